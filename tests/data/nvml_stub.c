/* A management library of GPUs that do not exist: what the tests load in place of libnvidia-ml.so.1.
 *
 * NVML_STUB_GPUS  One line a GPU: uuid|name|bytes total|bytes used|option,option,...
 *                 Options: handle=CODE, uuid=CODE, memory=CODE (that call fails with CODE), mig (split into
 *                 instances), old (knows nothing of instances).
 * NVML_STUB_INIT  Code with which the initialisation fails; 0 or unset: it succeeds.
 * NVML_STUB_LOG   File that gets a line for each initialisation ("init") and end ("shutdown").
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
enum { GPUS_MAX = 16, LINE_MAX_BYTES = 512, FIELDS = 5 };

struct gpu {
    char line[LINE_MAX_BYTES];
    const char *uuid, *name, *options;
    unsigned long long total, used;
};

struct memory {
    unsigned long long total, free, used;
};

static struct gpu gpus[GPUS_MAX];
static unsigned gpu_count;
static int sessions;

static void record(const char *event) {
    const char *path = getenv("NVML_STUB_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", event);
        fclose(file);
    }
}

static void read_gpu(struct gpu *gpu, const char *line, size_t length) {
    if (length >= sizeof gpu->line) length = sizeof gpu->line - 1;
    memcpy(gpu->line, line, length);
    gpu->line[length] = 0;
    const char *fields[FIELDS] = {"", "", "0", "0", ""};
    char *rest = gpu->line;
    for (int i = 0; i < FIELDS && rest; i++) fields[i] = strsep(&rest, "|");
    gpu->uuid = fields[0];
    gpu->name = fields[1];
    gpu->total = strtoull(fields[2], NULL, 0);
    gpu->used = strtoull(fields[3], NULL, 0);
    gpu->options = fields[4];
}

static void read_gpus(void) {
    const char *text = getenv("NVML_STUB_GPUS");
    gpu_count = 0;
    while (text && *text && gpu_count < GPUS_MAX) {
        size_t length = strcspn(text, "\n");
        if (length) read_gpu(&gpus[gpu_count++], text, length);
        text += length + (text[length] == '\n');
    }
}

static int fault(const struct gpu *gpu, const char *call) {
    char key[32];
    snprintf(key, sizeof key, "%s=", call);
    const char *found = strstr(gpu->options, key);
    return found ? atoi(found + strlen(key)) : SUCCESS;
}

static int copy_text(const char *from, char *to, unsigned size) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *code = getenv("NVML_STUB_INIT");
    if (code && atoi(code)) return atoi(code);
    read_gpus();
    sessions++;
    record("init");
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!sessions) return UNINITIALIZED;
    sessions--;
    record("shutdown");
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    return code == 9 ? "Driver Not Loaded" : code == 15 ? "GPU is lost" : code == 999 ? "Unknown Error" : "Error";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!sessions) return UNINITIALIZED;
    *count = gpu_count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **device) {
    if (!sessions) return UNINITIALIZED;
    if (index >= gpu_count) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return fault(*device, "handle");
}

int nvmlDeviceGetUUID(struct gpu *device, char *uuid, unsigned size) {
    int code = fault(device, "uuid");
    return code ? code : copy_text(device->uuid, uuid, size);
}

int nvmlDeviceGetName(struct gpu *device, char *name, unsigned size) {
    return copy_text(device->name, name, size);
}

int nvmlDeviceGetMemoryInfo(struct gpu *device, struct memory *memory) {
    int code = fault(device, "memory");
    if (code) return code;
    memory->total = device->total;
    memory->used = device->used;
    memory->free = device->total - device->used;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(struct gpu *device, unsigned *current, unsigned *pending) {
    if (strstr(device->options, "old")) return NOT_SUPPORTED;
    *current = *pending = strstr(device->options, "mig") != NULL;
    return SUCCESS;
}
