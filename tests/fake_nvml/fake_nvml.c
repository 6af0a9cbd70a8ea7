/*
 * A stand-in for libnvidia-ml.so.1, for tests only: it says what a text file says (path in FAKE_NVML_STATE).
 *
 * One fact a line, read anew whenever the file has changed:
 *
 *     driver 580.65.06
 *     gpu 0 name NVIDIA H100 80GB HBM3      also: uuid, bus, memory, used, reserved (MiB), util, power (mW), energy (mJ),
 *                                           temp, memtemp, smclock, memclock, reasons, numa, cc (90), lost, ecc, pending,
 *                                           failed, action, mig (0, 1 or 2: asked for), switch
 *     mig 0 2 MIG-uuid 1 9728               card, index, uuid, slices, MiB
 *     proc 0 4711 1000 50                   card, pid, MiB, SM percent
 *     link 0 1                              NVLink between two cards
 *     near 0 1 10                           common ancestor (10 one switch ... 50 across sockets, the default)
 *     xid 3 0 79                            number of the event (each is told once), card, code
 *     lostevent 4                           number: waiting for events fails with "GPU is lost", once
 *     fail nvmlDeviceGetPowerUsage 3        the call answers this code
 *
 * Versioned structures are checked as the real library does: a wrong tag is answered with 25.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, LOST = 15, VERSION = 25 };
enum { MAX_GPUS = 16, MAX_PROCS = 64, MAX_MIG = 16, MAX_FAILS = 32, MAX_EVENTS = 64 };

typedef struct {
    char name[96], uuid[96], bus[32];
    long memory, used, reserved, util, power, energy, temp, memtemp, smclock, memclock, reasons, cc, lost, ecc, pending, failed, action, mig, switched;
} Gpu;
typedef struct { int gpu, index, slices; long memory; char uuid[96]; } Mig;
typedef struct { int gpu, pid; long memory; int sm; } Proc;

static char driver_version[80];
static Gpu gpus[MAX_GPUS];
static int gpu_count, proc_count, mig_count, fail_count, event_count, is_open;
static Mig migs[MAX_MIG];
static Proc procs[MAX_PROCS];
static char links[MAX_GPUS][MAX_GPUS];
static int near[MAX_GPUS][MAX_GPUS];
static struct { char call[64]; int code; } fails[MAX_FAILS];
static struct { int number, gpu, xid; } events[MAX_EVENTS];
static int told;
static struct timespec read_at;
static ino_t read_inode;

static void set(Gpu *g, const char *key, const char *value) {
    struct { const char *key; long *at; } numbers[] = {
        {"memory", &g->memory}, {"used", &g->used}, {"reserved", &g->reserved}, {"util", &g->util}, {"power", &g->power},
        {"energy", &g->energy}, {"temp", &g->temp}, {"memtemp", &g->memtemp}, {"smclock", &g->smclock}, {"memclock", &g->memclock},
        {"reasons", &g->reasons}, {"cc", &g->cc}, {"lost", &g->lost}, {"ecc", &g->ecc}, {"pending", &g->pending},
        {"failed", &g->failed}, {"action", &g->action}, {"mig", &g->mig}, {"switch", &g->switched},
    };
    if (!strcmp(key, "name")) snprintf(g->name, sizeof g->name, "%.95s", value);
    else if (!strcmp(key, "uuid")) snprintf(g->uuid, sizeof g->uuid, "%.95s", value);
    else if (!strcmp(key, "bus")) snprintf(g->bus, sizeof g->bus, "%.31s", value);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(key, numbers[i].key)) *numbers[i].at = atol(value);
}

static void refresh(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat st;
    if (!path || stat(path, &st)) return;
    if (st.st_ino == read_inode && !memcmp(&st.st_mtim, &read_at, sizeof read_at)) return;
    read_at = st.st_mtim;
    read_inode = st.st_ino;
    FILE *file = fopen(path, "r");
    if (!file) return;
    memset(gpus, 0, sizeof gpus);
    memset(links, 0, sizeof links);
    memset(near, 0, sizeof near);
    gpu_count = proc_count = mig_count = fail_count = event_count = 0;
    char line[512], key[64], value[256];
    int a, b, c;
    long m;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "driver %79s", driver_version) == 1) continue;
        if (sscanf(line, "gpu %d %63s %255[^\n]", &a, key, value) == 3 && a >= 0 && a < MAX_GPUS) {
            set(&gpus[a], key, value);
            if (a >= gpu_count) gpu_count = a + 1;
        } else if (sscanf(line, "mig %d %d %95s %d %ld", &a, &b, value, &c, &m) == 5 && mig_count < MAX_MIG) {
            Mig *mig = &migs[mig_count++];
            *mig = (Mig){.gpu = a, .index = b, .slices = c, .memory = m};
            snprintf(mig->uuid, sizeof mig->uuid, "%.95s", value);
        } else if (sscanf(line, "proc %d %d %ld %d", &a, &b, &m, &c) == 4 && proc_count < MAX_PROCS) {
            procs[proc_count++] = (Proc){a, b, m, c};
        } else if (sscanf(line, "link %d %d", &a, &b) == 2) {
            links[a][b] = links[b][a] = 1;
        } else if (sscanf(line, "near %d %d %d", &a, &b, &c) == 3) {
            near[a][b] = near[b][a] = c;
        } else if (sscanf(line, "xid %d %d %d", &a, &b, &c) == 3 && event_count < MAX_EVENTS) {
            events[event_count].number = a, events[event_count].gpu = b, events[event_count++].xid = c;
        } else if (sscanf(line, "lostevent %d", &a) == 1 && event_count < MAX_EVENTS) {
            events[event_count].number = a, events[event_count].gpu = -1, events[event_count++].xid = 0;
        } else if (sscanf(line, "fail %63s %d", key, &a) == 2 && fail_count < MAX_FAILS) {
            snprintf(fails[fail_count].call, sizeof fails[0].call, "%s", key);
            fails[fail_count++].code = a;
        }
    }
    fclose(file);
}

static int ready(const char *call) {
    refresh();
    if (!is_open) return UNINITIALIZED;
    for (int i = 0; i < fail_count; i++)
        if (!strcmp(fails[i].call, call)) return fails[i].code;
    return OK;
}

static int number_of(void *handle) { return (int)((Gpu *)handle - gpus); }
static int is_mig(void *handle) { return (Mig *)handle >= migs && (Mig *)handle < migs + MAX_MIG; }

/* Most calls: is the library open, does the test want it to fail, is the card there? */
#define ENTER(handle) \
    int code = ready(__func__); \
    if (code) return code; \
    if (!is_mig(handle) && (number_of(handle) < 0 || number_of(handle) >= gpu_count)) return INVALID; \
    Gpu *g = is_mig(handle) ? &gpus[((Mig *)(handle))->gpu] : (Gpu *)(handle); \
    if (g->lost) return LOST
#define NUMBER(name, type, value) \
    int name(void *h, type *out) { ENTER(h); *out = (type)(value); return OK; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; is_open = 1; return ready(__func__); }
int nvmlInit_v2(void) { is_open = 1; return ready(__func__); }
int nvmlShutdown(void) { is_open = 0; return OK; }
const char *nvmlErrorString(int code) { static char text[32]; snprintf(text, sizeof text, "code %d", code); return text; }
static int copy(char *out, unsigned size, const char *text) { if (strlen(text) >= size) return TOO_SMALL; strcpy(out, text); return OK; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { int code = ready(__func__); return code ? code : copy(out, size, driver_version); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { int code = ready(__func__); return code ? code : copy(out, size, "13.580.65.06"); }
int nvmlSystemGetCudaDriverVersion(int *out) { *out = 13000; return ready(__func__); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return ready(__func__); }
int nvmlDeviceGetCount_v2(unsigned *out) { int code = ready(__func__); *out = gpu_count; return code; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    int code = ready(__func__);
    if (code) return code;
    if ((int)index >= gpu_count) return INVALID;
    *out = &gpus[index];
    return gpus[index].lost ? LOST : OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    int code = ready(__func__);
    for (int i = 0; !code && i < gpu_count; i++) if (!strcmp(gpus[i].uuid, uuid)) { *out = &gpus[i]; return OK; }
    return code ? code : NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out) {
    int code = ready(__func__);
    for (int i = 0; !code && i < gpu_count; i++) if (!strcmp(gpus[i].bus, bus)) { *out = &gpus[i]; return OK; }
    return code ? code : NOT_FOUND;
}
int nvmlDeviceGetName(void *h, char *out, unsigned size) { ENTER(h); return copy(out, size, g->name); }
int nvmlDeviceGetUUID(void *h, char *out, unsigned size) { ENTER(h); return copy(out, size, is_mig(h) ? ((Mig *)h)->uuid : g->uuid); }
int nvmlDeviceGetSerial(void *h, char *out, unsigned size) { ENTER(h); (void)out; (void)size; return NOT_SUPPORTED; }
NUMBER(nvmlDeviceGetIndex, unsigned, number_of(g))
NUMBER(nvmlDeviceGetMinorNumber, unsigned, number_of(g))
NUMBER(nvmlDeviceGetPersistenceMode, int, 1)
NUMBER(nvmlDeviceGetBrand, int, 0)
NUMBER(nvmlDeviceGetComputeMode, int, 0)
NUMBER(nvmlDeviceGetPerformanceState, int, 0)
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { ENTER(h); *major = g->cc / 10; *minor = g->cc % 10; return OK; }
int nvmlDeviceGetPciInfo_v3(void *h, void *out) {
    ENTER(h);
    struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } *pci = out;
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", g->bus);
    snprintf(pci->legacy, sizeof pci->legacy, "%.12s", g->bus + 4);
    return OK;
}

/* Memory: the old call counts the driver's reserve as used. */
int nvmlDeviceGetMemoryInfo(void *h, void *out) {
    ENTER(h);
    struct { unsigned long long total, free, used; } *m = out;
    m->total = (unsigned long long)g->memory << 20;
    m->used = (unsigned long long)(g->used + g->reserved) << 20;
    m->free = m->total - m->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, void *out) {
    ENTER(h);
    struct { unsigned version; unsigned long long total, reserved, free, used; } *m = out;
    if (m->version != 0x02000028) return VERSION;
    m->total = (unsigned long long)g->memory << 20;
    m->used = (unsigned long long)g->used << 20;
    m->reserved = (unsigned long long)g->reserved << 20;
    m->free = m->total - m->used - m->reserved;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *h, unsigned *out) {
    ENTER(h);
    if (g->mig == 1) return NOT_SUPPORTED;
    out[0] = g->util;
    out[1] = g->util / 2;
    return OK;
}
/* Two samples around the present value, newer each time. */
int nvmlDeviceGetSamples(void *h, int type, unsigned long long last, int *value_type, unsigned *count, void *out) {
    ENTER(h);
    if (type != 1 || g->mig == 1) return NOT_SUPPORTED;
    struct { unsigned long long stamp; union { unsigned ui; unsigned long long ull; } value; } *samples = out;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long us = now.tv_sec * 1000000ull + now.tv_nsec / 1000;
    if (us <= last) return NOT_FOUND;
    *value_type = 1;
    if (!samples) { *count = 2; return OK; }
    if (*count < 2) return TOO_SMALL;
    *count = 2;
    for (int i = 0; i < 2; i++) {
        samples[i].stamp = us - 1 + i;
        samples[i].value.ull = 0;
        samples[i].value.ui = g->util + (i ? 1 : -1) * (g->util > 0 && g->util < 100);
    }
    return OK;
}
NUMBER(nvmlDeviceGetPowerUsage, unsigned, g->power)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, 700000)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, 700000)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, g->reasons)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, g->reasons)
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *out) { ENTER(h); if (!g->energy) return NOT_SUPPORTED; *out = g->energy; return OK; }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *out) { ENTER(h); (void)sensor; *out = g->temp; return OK; }
int nvmlDeviceGetTemperatureV(void *h, void *out) {
    ENTER(h);
    struct { unsigned version; int sensor; int temperature; } *t = out;
    if (t->version != 0x0100000C) return VERSION;
    t->temperature = g->temp;
    return OK;
}
int nvmlDeviceGetFanSpeed(void *h, unsigned *out) { ENTER(h); (void)out; return NOT_SUPPORTED; }
int nvmlDeviceGetClockInfo(void *h, int type, unsigned *out) { ENTER(h); *out = type == 2 ? g->memclock : g->smclock; return OK; }
int nvmlDeviceGetFieldValues(void *h, int count, void *out) {
    ENTER(h);
    struct { unsigned id, scope; long long stamp, latency; int type, code; union { double d; unsigned ui; unsigned long long ull; } value; } *f = out;
    for (int i = 0; i < count; i++) {
        f[i].code = OK;
        f[i].type = 1;
        f[i].value.ull = 0;
        switch (f[i].id) {
        case 82: if (g->memtemp) f[i].value.ui = g->memtemp; else f[i].code = NOT_SUPPORTED; break;
        case 91: f[i].value.ui = 18; break;
        case 186: f[i].value.ui = g->power; break;
        case 230: if (g->action >= 0) f[i].value.ui = g->action; else f[i].code = NOT_SUPPORTED; break;
        default: f[i].code = NOT_SUPPORTED;
        }
    }
    return OK;
}

/* Processes: ask for the number first, then for the list. */
static int list(void *h, unsigned *count, void *out, const char *call) {
    int code = ready(call);
    if (code) return code;
    Gpu *g = h;
    if (g->lost) return LOST;
    struct { unsigned pid; unsigned long long used; unsigned gi, ci; } *p = out;
    unsigned found = 0;
    for (int i = 0; i < proc_count; i++) {
        if (procs[i].gpu != number_of(h)) continue;
        if (p && found < *count) {
            p[found].pid = procs[i].pid;
            p[found].used = procs[i].memory < 0 ? ~0ull : (unsigned long long)procs[i].memory << 20;
            p[found].gi = p[found].ci = 0xFFFFFFFF;
        }
        found++;
    }
    int small = found > (p ? *count : 0);
    *count = found;
    return small ? TOO_SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, void *out) { return list(h, count, out, __func__); }
static int none(void *h, unsigned *count) { ENTER(h); *count = 0; return OK; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *count, void *out) { (void)out; return none(h, count); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *count, void *out) { (void)out; return none(h, count); }
int nvmlDeviceGetProcessUtilization(void *h, void *out, unsigned *count, unsigned long long last) {
    ENTER(h);
    (void)last;
    struct { unsigned pid; unsigned long long stamp; unsigned sm, memory, encoder, decoder; } *p = out;
    unsigned found = 0;
    for (int i = 0; i < proc_count; i++) {
        if (procs[i].gpu != number_of(h)) continue;
        if (p && found < *count) {
            p[found].pid = procs[i].pid;
            p[found].stamp = (unsigned long long)time(NULL) * 1000000;
            p[found].sm = procs[i].sm;
            p[found].memory = p[found].encoder = p[found].decoder = 0;
        }
        found++;
    }
    if (!found) return NOT_FOUND;
    if (!p || *count < found) { *count = found; return TOO_SMALL; }
    *count = found;
    return OK;
}

/* Links. */
int nvmlDeviceGetTopologyCommonAncestor(void *h, void *other, int *out) { ENTER(h); int n = near[number_of(h)][number_of(other)]; *out = n ? n : 50; return OK; }
int nvmlDeviceGetP2PStatus(void *h, void *other, int index, int *out) { ENTER(h); *out = index == 2 && links[number_of(h)][number_of(other)] ? 0 : 5; return OK; }
int nvmlDeviceGetNvLinkState(void *h, unsigned link, unsigned *out) { ENTER(h); if (link >= 18) return INVALID; *out = 1; return OK; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, int *out) { ENTER(h); if (link >= 18) return INVALID; *out = g->switched ? 2 : 0; return OK; }
int nvmlDeviceGetGpuFabricInfoV(void *h, void *out) {
    ENTER(h);
    struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned mask; unsigned char summary; } *f = out;
    return f->version == 0x03000028 ? NOT_SUPPORTED : VERSION;
}

/* Health. */
int nvmlDeviceGetTotalEccErrors(void *h, int type, int counter, unsigned long long *out) { ENTER(h); (void)type; (void)counter; *out = g->ecc; return OK; }
int nvmlDeviceGetRemappedRows(void *h, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ENTER(h);
    *corrected = *uncorrected = 0;
    *pending = g->pending;
    *failed = g->failed;
    return OK;
}

/* Partitioned cards. */
int nvmlDeviceGetMigMode(void *h, unsigned *current, unsigned *pending) { ENTER(h); *current = g->mig == 1; *pending = g->mig >= 1; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *out) { ENTER(h); *out = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned index, void **out) {
    ENTER(h);
    for (int i = 0; i < mig_count; i++) if (migs[i].gpu == number_of(h) && migs[i].index == (int)index) { *out = &migs[i]; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceIsMigDeviceHandle(void *h, unsigned *out) { *out = is_mig(h); return OK; }
int nvmlDeviceGetAttributes_v2(void *h, void *out) {
    ENTER(h);
    if (!is_mig(h)) return NOT_SUPPORTED;
    struct { unsigned sms, copy, decoders, encoders, jpeg, ofa, slices, compute; unsigned long long memory; } *a = out;
    memset(a, 0, sizeof *a);
    a->slices = a->compute = ((Mig *)h)->slices;
    a->memory = ((Mig *)h)->memory;
    return OK;
}
int nvmlDeviceGetGpuInstanceId(void *h, unsigned *out) { ENTER(h); *out = ((Mig *)h)->index + 1; return OK; }
int nvmlDeviceGetComputeInstanceId(void *h, unsigned *out) { ENTER(h); *out = 0; return OK; }

/* Events. */
int nvmlEventSetCreate(void **out) { static int set; *out = &set; return ready(__func__); }
int nvmlEventSetFree(void *set) { (void)set; return ready(__func__); }
NUMBER(nvmlDeviceGetSupportedEventTypes, unsigned long long, 0x1F)
int nvmlDeviceRegisterEvents(void *h, unsigned long long types, void *set) { ENTER(h); (void)types; (void)set; return OK; }
int nvmlEventSetWait_v2(void *set, void *out, unsigned timeout_ms) {
    (void)set;
    struct { void *device; unsigned long long type, data; unsigned gi, ci; } *e = out;
    for (unsigned waited = 0;; waited += 10) {
        int code = ready(__func__);
        if (code) return code;
        for (int i = 0; i < event_count; i++) {
            if (events[i].number <= told) continue;
            told = events[i].number;
            if (events[i].gpu < 0) return LOST;
            memset(e, 0, sizeof *e);
            e->device = &gpus[events[i].gpu];
            e->type = 8;
            e->data = events[i].xid;
            return OK;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(10000);
    }
}
