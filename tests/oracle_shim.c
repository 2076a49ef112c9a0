/* Stands in for the CUDA calls of a compiled CuTe DSL host object and records its launches (see oracle.py). */
#include <stdint.h>
#include <string.h>

#define MAX_LAUNCHES 8
#define MAX_PARAMETERS 128
#define MAX_BYTES 4096
#define MAX_ATTRIBUTES 17

typedef struct {
    uint32_t id, pad;
    uint32_t value[16];
} Attribute;

typedef struct {
    uint32_t grid[3], block[3];
    uint64_t shared_bytes;
    void *stream;
    Attribute *attributes;
    uint32_t count;
} Config;

static struct {
    Config config;
    Attribute attributes[MAX_ATTRIBUTES];
    unsigned char parameters[MAX_PARAMETERS][MAX_BYTES];
} launches[MAX_LAUNCHES];
static int counts[MAX_LAUNCHES], sizes[MAX_LAUNCHES][MAX_PARAMETERS], expected, launched;

void oracle_reset(const int *parameter_counts, const int *parameter_sizes, int n) {
    launched = 0;
    expected = n;
    for (int i = 0; i < n; i++) {
        counts[i] = parameter_counts[i];
        for (int j = 0; j < counts[i]; j++) sizes[i][j] = *parameter_sizes++;
    }
}

int _cudaLaunchKernelEx(void *config, void *kernel, void **parameters) {
    (void)kernel;
    if (launched >= expected) return 1;
    launches[launched].config = *(Config *)config;
    for (uint32_t i = 0; i < launches[launched].config.count; i++)
        launches[launched].attributes[i] = launches[launched].config.attributes[i];
    for (int i = 0; i < counts[launched]; i++)
        memcpy(launches[launched].parameters[i], parameters[i], sizes[launched][i]);
    launched++;
    return 0;
}

/* Fill the stack below this frame, which the host function will use next: what it leaves unwritten shows the filling. */
static void __attribute__((noinline)) fill_stack(int byte) {
    volatile unsigned char room[1 << 16];
    for (unsigned i = 0; i < sizeof room; i++) room[i] = (unsigned char)byte;
}

void __attribute__((noinline)) oracle_run(void (*function)(void **), void **arguments, int byte) {
    fill_stack(byte);
    function(arguments);
}

int oracle_launches(void) { return launched; }

void oracle_config(int index, uint64_t *out) {
    Config *c = &launches[index].config;
    for (int i = 0; i < 3; i++) {
        out[i] = c->grid[i];
        out[3 + i] = c->block[i];
    }
    out[6] = c->shared_bytes;
    out[7] = (uint64_t)c->stream;
    out[8] = c->count;
}

void oracle_attribute(int index, int i, uint32_t *out) {
    out[0] = launches[index].attributes[i].id;
    memcpy(out + 1, launches[index].attributes[i].value, 12);
}

void oracle_parameter(int index, int i, unsigned char *out) {
    memcpy(out, launches[index].parameters[i], sizes[index][i]);
}

/* The object refers to these; the host function itself calls none of them. */
int _cudaLibraryLoadData(void) { return 1; }
int _cudaLibraryGetKernel(void) { return 1; }
int _cudaDeviceGetAttribute(void) { return 1; }
int _cudaFuncSetAttribute(void) { return 1; }
int _cudaGetDevice(void) { return 1; }
int _cudaKernelSetAttributeForDevice(void) { return 1; }
int _cuKernelGetAttribute(void) { return 1; }
