"""A simulated shell: enough commands, terminal behaviour and signals to try streams without Docker.

Commands: `echo`, `env`, `pwd`, `whoami`, `hostname`, `tty`, `stty size`, `nvidia-smi`, `cat`, `sleep`,
`true`, `false`, `exit`. Every other command prints its own line. With a terminal, the shell echoes what is
typed, and Ctrl-C and Ctrl-D do what they do elsewhere.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from mooring.agent.runtime import Container
from mooring.schemas.agent_streams import ExecRequest, WindowSize
from mooring_client.stream_messages import Channel

Output = tuple[Channel, bytes]

_INTERRUPT, _END, _ERASE = 0x03, 0x04, (0x08, 0x7F)
_PROMPT: Final = b"$ "
_SHELLS: Final = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
# 128 plus the number of the signal, as a shell reports it.
_EXIT_CODES: Final = {"HUP": 129, "INT": 130, "QUIT": 131, "KILL": 137, "ALRM": 142, "TERM": 143}
_MAX_LINE: Final = 4096


@dataclass
class SimulatedShell:
    """A command and what has been typed into it. `exit_code` is set at its end.

    Attributes:
        wakes_in_s: how long a `sleep` of the current command lasts; None: no `sleep` runs.
    """

    container: Container
    request: ExecRequest
    exit_code: int | None = None
    wakes_in_s: float | None = None
    _window: WindowSize = field(default_factory=lambda: WindowSize(width=80, height=24))
    _line: bytearray = field(default_factory=bytearray)
    _is_interactive: bool = False
    _is_cat: bool = False
    _has_input: bool = True

    def begin(self) -> Iterator[Output]:
        """Start the command of the request."""
        self._window = self.request.window or self._window
        command = self.request.command
        if command[0] in _SHELLS and not any(each.endswith("c") for each in command[1:2]):
            self._is_interactive = True
            yield from self._prompt()
            return
        line = command[2] if command[0] in _SHELLS and len(command) > 2 else shlex.join(command)
        yield from self._run(line)
        self._end_unless_busy()

    def typed(self, data: bytes) -> Iterator[Output]:
        """Handle input."""
        if self._is_cat and not self.request.tty:
            yield Channel.STDOUT, data
            return
        for byte in data:
            if self.exit_code is not None:
                return
            yield from self._key(byte)

    def input_ended(self) -> Iterator[Output]:
        if self._line and self._is_interactive:
            yield from self._enter()
        self._is_cat = self._has_input = False
        self._end_unless_busy()

    def woken(self) -> Iterator[Output]:
        """Handle the end of a `sleep`."""
        self.wakes_in_s = None
        self._end_unless_busy()
        yield from self._prompt()

    def resize(self, window: WindowSize) -> None:
        self._window = window

    def signal(self, name: str) -> Iterator[Output]:
        if name not in _EXIT_CODES:
            return
        if self._is_interactive and name == "INT":
            yield from self._interrupt()
        else:
            self.exit_code = _EXIT_CODES[name]

    def _key(self, byte: int) -> Iterator[Output]:
        if not self.request.tty:
            yield from self._append(byte)
        elif byte == _INTERRUPT:
            yield from self._interrupt()
        elif byte == _END and not self._line:
            yield from self._end_of_file()
        elif byte in _ERASE:
            if self._line:
                self._line.pop()
                yield self._out(b"\b \b")
        else:
            yield self._out(b"\n" if byte in b"\r\n" else bytes([byte]))
            yield from self._append(ord("\n") if byte == ord("\r") else byte)

    def _end_of_file(self) -> Iterator[Output]:
        """Handle Ctrl-D: it ends only the program that reads."""
        if self._is_cat and self._is_interactive:
            self._is_cat = False
            yield from self._prompt()
        else:
            yield from self.input_ended()

    def _append(self, byte: int) -> Iterator[Output]:
        if byte == ord("\n"):
            yield from self._enter()
        elif len(self._line) < _MAX_LINE:
            self._line.append(byte)

    def _enter(self) -> Iterator[Output]:
        line, self._line = self._line.decode(errors="replace"), bytearray()
        if self._is_cat:
            yield self._out(f"{line}\n".encode())
        elif self.wakes_in_s is None:
            yield from self._run(line)
            yield from self._prompt()

    def _interrupt(self) -> Iterator[Output]:
        self._line.clear()
        self.wakes_in_s, self._is_cat = None, False
        yield self._out(b"^C\n")
        if self._is_interactive:
            yield from self._prompt()
        else:
            self.exit_code = _EXIT_CODES["INT"]

    def _prompt(self) -> Iterator[Output]:
        is_idle = self.exit_code is None and self.wakes_in_s is None and not self._is_cat
        if self._is_interactive and self.request.tty and is_idle:
            yield self._out(_PROMPT)

    def _end_unless_busy(self) -> None:
        reads = self._is_cat or (self._is_interactive and self._has_input)
        is_busy = reads or self.wakes_in_s is not None
        if not is_busy and self.exit_code is None:
            self.exit_code = 0

    def _run(self, line: str) -> Iterator[Output]:
        channel = Channel.STDERR if line.rstrip().endswith(">&2") else Channel.STDOUT
        line = line.strip().removesuffix(">&2").rstrip()
        if not line:
            return
        try:
            name, *arguments = shlex.split(line)
        except ValueError:
            name, *arguments = line.split()
        found = _COMMANDS.get(name)
        text = f"simulated: {line}\n" if found is None else found(self, arguments)
        if text:
            yield self._out(text.encode(), channel)

    def _out(self, data: bytes, channel: Channel = Channel.STDOUT) -> Output:
        if not self.request.tty:
            return channel, data
        return Channel.STDOUT, data.replace(b"\n", b"\r\n")

    # --- commands: return what they print

    def _echo(self, arguments: list[str]) -> str:
        known = self.request.env
        words = [known.get(each[1:], "") if each.startswith("$") else each for each in arguments]
        return f"{' '.join(words)}\n"

    def _env(self, _arguments: list[str]) -> str:
        return "".join(f"{name}={value}\n" for name, value in self.request.env.items())

    def _pwd(self, _arguments: list[str]) -> str:
        return f"{self.request.working_dir or '/'}\n"

    def _whoami(self, _arguments: list[str]) -> str:
        return f"{self.request.user or 'root'}\n"

    def _hostname(self, _arguments: list[str]) -> str:
        return f"{self.container.instance_id}\n"

    def _tty(self, _arguments: list[str]) -> str:
        return "/dev/pts/0\n" if self.request.tty else "not a tty\n"

    def _stty(self, _arguments: list[str]) -> str:
        return f"{self._window.height} {self._window.width}\n"

    def _nvidia_smi(self, _arguments: list[str]) -> str:
        gpus = enumerate(self.container.gpu_uuids)
        return "".join(f"GPU {index}: simulated (UUID: {uuid})\n" for index, uuid in gpus)

    def _cat(self, _arguments: list[str]) -> str:
        self._is_cat = True
        return ""

    def _sleep(self, arguments: list[str]) -> str:
        if arguments and re.fullmatch(r"\d{1,9}(\.\d{1,3})?", arguments[0]):
            self.wakes_in_s = float(arguments[0])
            return ""
        return "sleep: usage: sleep SECONDS\n"

    def _true(self, _arguments: list[str]) -> str:
        return ""

    def _false(self, _arguments: list[str]) -> str:
        if not self._is_interactive:
            self.exit_code = 1
        return ""

    def _exit(self, arguments: list[str]) -> str:
        code = arguments[0] if arguments else "0"
        self.exit_code = int(code) % 256 if re.fullmatch(r"\d{1,5}", code) else 2
        return ""


_COMMANDS: Final[dict[str, Callable[[SimulatedShell, list[str]], str]]] = {
    "echo": SimulatedShell._echo,
    "env": SimulatedShell._env,
    "pwd": SimulatedShell._pwd,
    "whoami": SimulatedShell._whoami,
    "hostname": SimulatedShell._hostname,
    "tty": SimulatedShell._tty,
    "stty": SimulatedShell._stty,
    "nvidia-smi": SimulatedShell._nvidia_smi,
    "cat": SimulatedShell._cat,
    "sleep": SimulatedShell._sleep,
    "true": SimulatedShell._true,
    "false": SimulatedShell._false,
    "exit": SimulatedShell._exit,
}
