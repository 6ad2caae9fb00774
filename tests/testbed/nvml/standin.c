/* A simulated libnvidia-ml.so.1, configured by the text file NVIDIA_NVML_STANDIN.
 *
 * Every call reads the file again if it has changed. One directive per line; I and J are indices of GPUs:
 *
 *   gpus N                       GPUs, with plausible values of an H100
 *   set I KEY VALUE              uuid name memory_mib used_mib util util_mem power_mw limit_mw temperature sm
 *                                mem_clock fan energy_mj minor numa mig (0 off, 1 on) remap_failed remap_pending
 *                                retiring recovery events (a mask of types) pci cc (90 is 9.0)
 *   process I KIND PID MIB       KIND compute, graphics or mps; MIB -1: unknown
 *   process_name PID NAME
 *   slice I UUID MIB NAME        a MIG device; in the next three directives J is its index on its GPU. Its GPU
 *                                instance is J + 1, its compute instance 0
 *   slice_used I J MIB
 *   slice_parts I J GPU COMPUTE  its GPU slices and compute slices
 *   slice_process I J PID MIB    listed by the device and by the GPU
 *   nvlink I LINK J|switch       an active link to GPU J, or to a switch
 *   topology LEVEL               of every pair of GPUs (10 single ... 50 system)
 *   xid I CODE [GI CI]           reported once, in the order of the lines; I -1: no GPU; GI and CI are the GPU
 *                                instance and compute instance of a MIG device
 *   xids I CODE TIMES            the same XID several times
 *   event I TYPE DATA            an event of this type (decimal), reported like an XID
 *   error FUNCTION CODE [I]      the function fails, on GPU I or everywhere
 *   lost I                       the GPU is lost: every call returns 15
 *   hang FUNCTION SECONDS [I]    the function returns after this time
 *   driver VERSION | cuda N | cost_ns N (CPU time of each call) | print TEXT (on standard output, at each init)
 *
 * In names \xNN is a byte.
 */
#include "fleet.h"

static struct gpu *gpu_of(handle device) {
    long i = (long)device - 1;
    return i >= 0 && i < GPUS ? &current->gpu[i] : 0;
}

/* The configured result of this call, after its configured duration. Holds the lock only while it reads. */
static int ruled(const char *function, handle device) {
    struct gpu *gpu = gpu_of(device);
    double seconds = 0;
    long cost_ns;
    int code = OK;
    pthread_mutex_lock(&lock);
    refresh();
    cost_ns = current->cost_ns;
    if (gpu && (gpu->lost || (long)device > current->gpus)) code = LOST;
    for (int i = 0; i < current->rules; i++) {
        struct rule *rule = &current->rule[i];
        if (strcmp(rule->function, function) || (rule->gpu >= 0 && rule->gpu != (long)device - 1)) continue;
        if (rule->code) code = rule->code;
        seconds += rule->seconds;
    }
    pthread_mutex_unlock(&lock);
    if (seconds > 0) usleep((useconds_t)(seconds * 1e6));
    if (cost_ns)
        for (double end = now() + (double)cost_ns / 1e9; now() < end;) continue;
    return code;
}

#define RULED(device)                           \
    do {                                        \
        int code_ = ruled(__func__, (device));  \
        if (code_) return code_;                \
    } while (0)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    RULED(0);
    if (current->print[0]) {
        puts(current->print);
        fflush(stdout);
    }
    return OK;
}
int nvmlShutdown(void) { RULED(0); return OK; }
const char *nvmlErrorString(int code) { (void)code; return "stand-in error"; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { RULED(0); snprintf(to, size, "%s", current->driver); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { RULED(0); *to = current->cuda; return OK; }
int nvmlSystemGetProcessName(unsigned pid, char *to, unsigned size) {
    RULED(0);
    for (int i = 0; i < current->names; i++)
        if (current->name[i].pid == pid) {
            snprintf(to, size, "%s", current->name[i].name);
            return OK;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetCount_v2(unsigned *to) { RULED(0); *to = (unsigned)current->gpus; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, handle *to) {
    handle device = (handle)(long)(i + 1);
    RULED(device);
    *to = device;
    return OK;
}

/* A slice's handle is 4096 + 16 * GPU + slice. */
static struct slice *slice_of(handle device) {
    long n = (long)device - 4096;
    return n >= 0 ? &current->gpu[n / 16].slice[n % 16] : 0;
}
int nvmlDeviceGetUUID(handle device, char *to, unsigned size) {
    RULED(device);
    snprintf(to, size, "%s", slice_of(device) ? slice_of(device)->uuid : gpu_of(device)->uuid);
    return OK;
}
int nvmlDeviceGetName(handle device, char *to, unsigned size) {
    RULED(device);
    snprintf(to, size, "%s", slice_of(device) ? slice_of(device)->name : gpu_of(device)->name);
    return OK;
}
#define NUMBER(function, type, expression) \
    int function(handle device, type *to) { \
        struct gpu *gpu = gpu_of(device);   \
        RULED(device);                      \
        *to = (type)(expression);           \
        return OK;                          \
    }
NUMBER(nvmlDeviceGetMinorNumber, unsigned, gpu->minor)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, gpu->power_mw)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, gpu->limit_mw)
NUMBER(nvmlDeviceGetFanSpeed, unsigned, gpu->fan)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, u64, gpu->energy_mj)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, gpu->mig >= 0 ? 7 : 0)
NUMBER(nvmlDeviceGetSupportedEventTypes, u64, gpu ? gpu->events : 0)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, gpu->retiring)

int nvmlDeviceGetTemperature(handle device, unsigned sensor, unsigned *to) {
    (void)sensor;
    RULED(device);
    *to = gpu_of(device)->temperature;
    return OK;
}
struct temperature { unsigned version, sensor; int celsius; };
int nvmlDeviceGetTemperatureV(handle device, struct temperature *to) {
    RULED(device);
    to->celsius = (int)gpu_of(device)->temperature;
    return OK;
}
int nvmlDeviceGetClockInfo(handle device, unsigned kind, unsigned *to) {
    RULED(device);
    *to = kind == 2 ? gpu_of(device)->mem_clock : gpu_of(device)->sm;
    return OK;
}
int nvmlDeviceGetUtilizationRates(handle device, unsigned to[2]) {
    RULED(device);
    to[0] = gpu_of(device)->util;
    to[1] = gpu_of(device)->util_mem;
    return OK;
}
struct memory { u64 total, free, used; };
static struct memory memory_of(handle device) {
    struct gpu *gpu = gpu_of(device);
    struct slice *slice = slice_of(device);
    u64 total = slice ? slice->mib : gpu->memory_mib, used = slice ? slice->used_mib : gpu->used_mib;
    return (struct memory){total << 20, (total - used) << 20, used << 20};
}
int nvmlDeviceGetMemoryInfo(handle device, struct memory *to) {
    RULED(device);
    *to = memory_of(device);
    return OK;
}
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(handle device, struct memory_v2 *to) {
    struct memory one = memory_of(device);
    RULED(device);
    *to = (struct memory_v2){to->version, one.total, 0, one.free, one.used};
    return OK;
}
int nvmlDeviceGetMigMode(handle device, unsigned *current, unsigned *pending) {
    RULED(device);
    if (gpu_of(device)->mig < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)gpu_of(device)->mig;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(handle device, unsigned i, handle *to) {
    RULED(device);
    if ((int)i >= gpu_of(device)->slices) return NOT_FOUND;
    *to = (handle)(4096 + 16 * ((long)device - 1) + (long)i);
    return OK;
}
int nvmlDeviceGetGpuInstanceId(handle device, unsigned *to) {
    RULED(device);
    *to = slice_of(device) ? (unsigned)(((long)device - 4096) % 16) + 1 : ~0u;
    return OK;
}
int nvmlDeviceGetComputeInstanceId(handle device, unsigned *to) {
    RULED(device);
    *to = 0;
    return OK;
}
struct attributes { unsigned sm, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices; u64 memory_mib; };
int nvmlDeviceGetAttributes_v2(handle device, struct attributes *to) {
    struct slice *slice = slice_of(device);
    RULED(device);
    if (!slice || !slice->gpu_slices) return NOT_SUPPORTED;
    memset(to, 0, sizeof *to);
    to->gpu_slices = slice->gpu_slices;
    to->compute_slices = slice->compute_slices;
    to->memory_mib = slice->mib;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(handle device, int *major, int *minor) {
    RULED(device);
    *major = (int)gpu_of(device)->cc / 10;
    *minor = (int)gpu_of(device)->cc % 10;
    return OK;
}
int nvmlDeviceGetMemoryAffinity(handle device, unsigned words, u64 *to, unsigned scope) {
    (void)scope;
    RULED(device);
    memset(to, 0, words * sizeof *to);
    if (gpu_of(device)->numa >= 0) to[gpu_of(device)->numa / 64] = 1ull << gpu_of(device)->numa % 64;
    return OK;
}
int nvmlDeviceGetRemappedRows(handle device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    RULED(device);
    *corrected = *uncorrected = 0;
    *pending = gpu_of(device)->remap_pending;
    *failed = gpu_of(device)->remap_failed;
    return OK;
}
struct field { unsigned id, scope; long long timestamp, latency; unsigned type; int code; union { double d; unsigned u; } value; };
int nvmlDeviceGetFieldValues(handle device, int count, struct field *fields) {
    RULED(device);
    for (int i = 0; i < count; i++) {
        fields[i].type = 1;
        fields[i].code = fields[i].id == 230 ? OK : NOT_SUPPORTED;
        fields[i].value.u = gpu_of(device)->recovery;
    }
    return OK;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(handle device, struct pci *to) {
    RULED(device);
    memset(to, 0, sizeof *to);
    snprintf(to->bus_id, sizeof to->bus_id, "%s", gpu_of(device)->pci);
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(handle one, handle other, unsigned *to) {
    RULED(one);
    RULED(other);
    *to = (unsigned)current->topology;
    return OK;
}
int nvmlDeviceGetNvLinkState(handle device, unsigned link, unsigned *to) {
    RULED(device);
    if (link >= 18) return INVALID;
    *to = gpu_of(device)->link[link] != 0;
    return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(handle device, unsigned link, unsigned *to) {
    RULED(device);
    *to = gpu_of(device)->link[link] < 0 ? 2 : 0;
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(handle device, unsigned link, struct pci *to) {
    int far_end = gpu_of(device)->link[link];
    RULED(device);
    memset(to, 0, sizeof *to);
    snprintf(to->bus_id, sizeof to->bus_id, "%s", far_end > 0 ? current->gpu[far_end - 1].pci : "00000000:05:00.0");
    return OK;
}

struct process_info { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; };
static int processes(handle device, int kind, unsigned *count, struct process_info *to) {
    long slice = (long)device - 4096;
    struct gpu *gpu = slice >= 0 ? &current->gpu[slice / 16] : gpu_of(device);
    unsigned n = 0, room = *count;
    for (int i = 0; i < gpu->processes; i++) {
        struct process *process = &gpu->process[i];
        if (process->kind != kind || (slice >= 0 && process->slice != slice % 16)) continue;
        if (to && n < room)
            to[n] = (struct process_info){process->pid, process->mib < 0 ? ~0ull : (u64)process->mib << 20, ~0u, ~0u};
        n++;
    }
    *count = n;
    return n > room ? TOO_SMALL : OK;
}
#define PROCESSES_OF(function, kind) \
    int function(handle device, unsigned *count, struct process_info *to) { \
        RULED(device); \
        return processes(device, kind, count, to); \
    }
PROCESSES_OF(nvmlDeviceGetComputeRunningProcesses_v2, 0)
PROCESSES_OF(nvmlDeviceGetComputeRunningProcesses_v3, 0)
PROCESSES_OF(nvmlDeviceGetGraphicsRunningProcesses_v2, 1)
PROCESSES_OF(nvmlDeviceGetGraphicsRunningProcesses_v3, 1)
PROCESSES_OF(nvmlDeviceGetMPSComputeRunningProcesses_v3, 2)

struct event { handle device; u64 type, data; unsigned gpu_instance, compute_instance; };
int nvmlEventSetCreate(handle *to) {
    RULED(0);
    memset(registered, 0, sizeof registered);
    undefined = 0;
    *to = (handle)1;
    return OK;
}
int nvmlEventSetFree(handle set_) { (void)set_; RULED(0); return OK; }
int nvmlDeviceRegisterEvents(handle device, u64 types, handle set_) {
    int code = ruled(__func__, device);
    (void)set_;
    if (code == UNKNOWN) undefined = 1;
    if (!code) registered[(long)device - 1] = types;
    return code;
}
static int next_event(struct event *to) {
    int found = 0;
    pthread_mutex_lock(&lock);
    refresh();
    while (!found && delivered < current->xids) {
        int gpu = current->xid[delivered].gpu;
        u64 type = current->xid[delivered].type;
        *to = (struct event){gpu < 0 ? 0 : (handle)(long)(gpu + 1), type, current->xid[delivered].data,
                             current->xid[delivered].gi, current->xid[delivered].ci};
        delivered++;
        found = gpu < 0 || registered[gpu] & type;
    }
    pthread_mutex_unlock(&lock);
    return found;
}
int nvmlEventSetWait_v2(handle set_, struct event *to, unsigned timeout_ms) {
    (void)set_;
    for (double end = now() + timeout_ms / 1e3; now() < end; usleep(20000)) {
        RULED(0);
        if (undefined) return UNKNOWN;
        if (next_event(to)) return OK;
    }
    return TIMEOUT;
}
