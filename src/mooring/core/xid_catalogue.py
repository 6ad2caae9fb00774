"""NVIDIA's catalogue of XIDs: for each code the immediate action and the investigatory action.

Source: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (Ampere and later), as of DATE.
`-`: the catalogue lists no action. To update, change the table and DATE; `tests/core/test_xid.py` checks that
every code from 1 to LAST has exactly one row.
"""

from dataclasses import dataclass
from typing import Final

DATE: Final = "2025-10-29"
LAST: Final = 172


@dataclass(frozen=True, slots=True)
class XidEntry:
    immediate: str
    investigatory: str
    description: str


_TABLE: Final = """
1-7,9,10,12,15,17-24,26-30 | CONTACT_SUPPORT | - | Unused code
33-36,42,47,49-53,55-59,61 | CONTACT_SUPPORT | - | Unused code
65,73,81,87,90,91,111-118,122-125,138 | CONTACT_SUPPORT | - | Unused code
16 | CONTACT_SUPPORT | CONTACT_SUPPORT | Unused code
8 | RESTART_APP | CONTACT_SUPPORT | GPU stopped processing
11 | RESTART_APP | CHECK_APP/CUDA | Invalid or corrupted push buffer
13 | RESTART_APP | WORKFLOW_XID_13 | Graphics engine exception
14 | IGNORE | CONTACT_SUPPORT | Unused code
25 | RESTART_APP | CHECK_APP/CUDA | Invalid or illegal push buffer
31 | RESTART_APP | WORKFLOW_XID_31 | GPU memory page fault
32 | RESTART_APP | CHECK_APP/CUDA | Invalid or corrupted push buffer
37 | IGNORE | CHECK_APP/CUDA | Driver firmware error
38 | IGNORE | CONTACT_SUPPORT | Driver firmware error
39-41 | RESTART_APP | CONTACT_SUPPORT | Copy engine exception
43 | IGNORE | CONTACT_SUPPORT | GPU stopped processing
44 | IGNORE | CONTACT_SUPPORT | Graphics engine fault during a context switch
45 | WORKFLOW_XID_45 | RESTART_FM (alone) or IGNORE | Preemptive cleanup after an earlier error
46 | RESET_GPU | CONTACT_SUPPORT | GPU stopped processing
48 | WORKFLOW_XID_48 | WORKFLOW_XID_48 | Double-bit ECC error
54 | CHECK_MECHANICALS | CONTACT_SUPPORT | Auxiliary power is not connected
60 | RESTART_APP | INVESTIGATE_SW | Video processor exception
62 | RESET_GPU | CONTACT_SUPPORT | Internal microcontroller halt
63 | IGNORE | IGNORE | GPU memory remapping event
64 | RESET_GPU | CONTACT_SUPPORT | GPU memory remapping failure
66 | IGNORE | INVESTIGATE_SW | Illegal access by the driver
67 | IGNORE | CONTACT_SUPPORT | Illegal access by the driver
68 | RESTART_APP | CONTACT_SUPPORT | Video decoder exception
69 | RESTART_APP | CHECK_APP/CUDA | Graphics engine class error
70-72,75-77,85 | RESTART_APP | CONTACT_SUPPORT | Copy engine error
74 | WORKFLOW_NVLINK_ERR | CONTACT_SUPPORT | NVLink error
78 | UPDATE_SWFW | UPDATE_SWFW | vGPU start error
79 | RESTART_BM | CONTACT_SUPPORT | GPU has fallen off the bus
80 | RESTART_APP | CHECK_APP/CUDA | Corrupted data sent to the GPU
82,99-105 | RESTART_APP | CONTACT_SUPPORT | JPEG engine error
83,84,88,89,96-98 | RESTART_APP | CONTACT_SUPPORT | Video decoder error
86,139 | RESTART_APP | CONTACT_SUPPORT | Optical flow engine error
92 | IGNORE | CONTACT_SUPPORT | High rate of single-bit ECC errors
93 | IGNORE | CONTACT_SUPPORT | InfoROM wear limit exceeded, not fatal
94 | RESTART_APP | IGNORE (sympathetic) | Contained memory error
95 | RESET_GPU | IGNORE (sympathetic) | Uncontained memory error
106,107 | IGNORE | IGNORE | SMBPBI test message
108 | IGNORE | XID_137_FLOW | Unused code
109 | RESET_GPU | CONTACT_SUPPORT | Context switch timeout
110 | RESET_GPU | INVESTIGATE_SW | Security fault
119 | RESET_GPU | INVESTIGATE_SW | GSP RPC timeout
120 | RESET_GPU | INVESTIGATE_SW | GSP error
121 | IGNORE | CONTACT_SUPPORT | C2C link error
126-135 | RESTART_APP | CONTACT_SUPPORT | Copy engine error
136 | RESET_GPU | INVESTIGATE_LINK_SI | Link training failed
137 | IGNORE | XID_137_FLOW | NVLink privilege error
140 | RESET_GPU | CONTACT_SUPPORT | Unrecovered ECC error
141 | IGNORE | CONTACT_SUPPORT | CUDA fast path error
142 | CONTACT_SUPPORT | - | Video encoder error
143 | RESET_GPU | CONTACT_SUPPORT | GPU initialization error
144-150 | WORKFLOW_NVLINK5_ERR | WORKFLOW_NVLINK5_ERR | NVLink error
151 | RESTART_VM | CONTACT_SUPPORT | Key rotation error
152 | IGNORE | CONTACT_SUPPORT | DLA SMMU error
153 | IGNORE | CONTACT_SUPPORT | DLA timeout
154 | XID_154 | informational | GPU recovery action changed
155 | RESET_GPU | INVESTIGATE_SW_USER | NVLink software-defined error
156 | RESET_GPU | IGNORE | Resource retirement event
157 | IGNORE | CONTACT_SUPPORT | Resource retirement failure
158 | RESET_GPU | CONTACT_SUPPORT | GPU fatal timeout
159 | CHECK_UVM | SYMPATHETIC_REPORT_SOLO | CHI non-data error
160 | IGNORE | INVESTIGATE_SW | Channel retirement event
161 | IGNORE | INVESTIGATE_SW | Channel retirement failure
162 | - | - | Power smoothing engaged again
163 | - | - | Power smoothing disengaged
164 | - | - | Power smoothing circuitry is near the end of its life
165 | - | - | Power smoothing circuitry is at the end of its life
166 | - | - | NVLink traffic before encryption was configured
167 | - | - | PCIe fatal timeout
168 | - | - | Reduced GPU memory capacity
169 | - | - | Internal microcontroller halt
170 | - | - | NVLink interrupt in confidential computing mode
171 | - | - | Uncorrectable DRAM error
172 | - | - | Uncorrectable SRAM error
"""


def _codes(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def rows() -> list[tuple[int, XidEntry]]:
    """All codes with their entries, in the order of the table."""
    parsed = []
    for line in _TABLE.strip().splitlines():
        codes, immediate, investigatory, description = (part.strip() for part in line.split(" | "))
        entry = XidEntry(immediate.strip("-"), investigatory.strip("-"), description)
        parsed += [(code, entry) for code in _codes(codes)]
    return parsed


CATALOGUE: Final[dict[int, XidEntry]] = dict(rows())
