#include "device.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef unsigned long long address; /* CUdeviceptr */

static struct {
  int (*init)(unsigned);
  int (*get)(int*, int);
  int (*retain)(void**, int);
  int (*set_current)(void*);
  int (*wait)(void);
  int (*alloc)(address*, size_t);
  int (*fill)(address, unsigned char, size_t);
  int (*to_device)(address, const void*, size_t);
  int (*to_host)(void*, address, size_t);
} driver;

static void check(const char* what, int error) {
  if (error == 0) return;
  fprintf(stderr, "%s: CUDA driver error %d\n", what, error);
  exit(3);
}

const char* device_open(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return "no CUDA driver";
  const struct {
    const char* name;
    void* to;
  } symbols[] = {{"cuInit", &driver.init},
                 {"cuDeviceGet", &driver.get},
                 {"cuDevicePrimaryCtxRetain", &driver.retain},
                 {"cuCtxSetCurrent", &driver.set_current},
                 {"cuCtxSynchronize", &driver.wait},
                 {"cuMemAlloc_v2", &driver.alloc},
                 {"cuMemsetD8_v2", &driver.fill},
                 {"cuMemcpyHtoD_v2", &driver.to_device},
                 {"cuMemcpyDtoH_v2", &driver.to_host}};
  for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; ++i) {
    *(void**)symbols[i].to = dlsym(library, symbols[i].name);
    if (!*(void**)symbols[i].to) return "a CUDA driver that lacks a function";
  }
  int device = 0;
  void* context = NULL; /* the primary one: what the CUDA runtime uses too */
  if (driver.init(0) != 0 || driver.get(&device, 0) != 0) return "no GPU";
  if (driver.retain(&context, device) != 0 || driver.set_current(context) != 0) {
    return "a GPU that cannot be used";
  }
  return NULL;
}

void* device_new(const void* host, size_t bytes) {
  address at = 0;
  check("allocating", driver.alloc(&at, bytes ? bytes : 1));
  if (!host) check("clearing", driver.fill(at, 0, bytes ? bytes : 1));
  if (host && bytes) check("copying to the device", driver.to_device(at, host, bytes));
  return (void*)(uintptr_t)at;
}

void device_read(void* host, const void* device, size_t bytes) {
  check("waiting", driver.wait());
  check("copying to the host", driver.to_host(host, (address)(uintptr_t)device, bytes));
}
