/* What the parts of the idle GPU share. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int succeed(void) {
    return 0;
}

/* Begins a list of functions that only report success, whatever they are asked for. */
#define SUCCEED extern __attribute__((alias("succeed"))) __typeof__(succeed)

long idle_gpu_setting(const char *name, long otherwise);
int idle_gpu_count(void);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuGetProcAddress_v2(const char *name, void **entry, int version, unsigned long flags, int *found);
