// A stand-in for libcuda.so.1 that prints what it is asked to do. FAKE_STATUS makes launches fail, FAKE_LOAD loads.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static int status(const char *variable) { return getenv(variable) ? atoi(getenv(variable)) : 0; }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }

int cuLibraryLoadData(void **library, const char *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    printf("load %.4s\n", image);
    *library = (void *)0x11;
    return status("FAKE_LOAD");
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    printf("kernel %s of %p\n", name, library);
    *kernel = (void *)(name[0] == 'a' ? 0x22 : 0x23);
    return 0;
}

int cuKernelGetFunction(void **function, void *kernel) {
    printf("function of %p\n", kernel);
    *function = (char *)kernel + 0x11;
    return 0;
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
    printf("attribute %d of %p: %d\n", attribute, function, value);
    return 0;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    *blocks = shared > 100000 ? 1 : 2;
    return 0;
}

struct config {
    unsigned grid[3], block[3], shared;
    void *stream;
    const int *attributes;
    unsigned num_attributes;
};

static int launch(void *function, const struct config *c, void **arguments, void **extra) {
    printf("launch %p grid %u %u %u block %u %u %u shared %u stream %p q %p extra %p\n", function, c->grid[0], c->grid[1],
           c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream, *(void **)arguments[0],
           extra);
    for (unsigned i = 0; i < c->num_attributes; ++i) {
        const int *attribute = c->attributes + 18 * i;
        printf("attribute %d of the launch: %d %d %d\n", attribute[0], attribute[2], attribute[3], attribute[4]);
    }
    if (c->shared == 0) printf("lent %p %p\n", (*(void ***)(arguments + 1))[0], (*(void ***)(arguments + 1))[1]);
    return status("FAKE_STATUS");
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    const struct config config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, 0, 0};
    return launch(function, &config, arguments, extra);
}

int cuLaunchKernelEx(const struct config *config, void *function, void **arguments, void **extra) {
    return launch(function, config, arguments, extra);
}

int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_MADE_UP"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "made up"; return 0; }

static int not_there(void) { return 999; }

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *found) {
    *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
    if (!*function) *function = (void *)not_there;
    if (found) *found = 0;
    return 0;
}
