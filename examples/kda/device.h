/* Device memory through the driver alone, loaded while running, so that the example builds without
 * a CUDA toolkit. A program that has one uses cudaMalloc, cudaMemcpy and cudaDeviceSynchronize. */
#ifndef DEVICE_H_
#define DEVICE_H_

#include <stddef.h>

/* Makes the first GPU current for this thread. Null, or one line that says why there is none. */
const char* device_open(void);

/* Memory aligned to 256 bytes, with a copy of `host` or, if that is null, zeros. Ends the program
 * when there is none. It goes when the program ends. */
void* device_new(const void* host, size_t bytes);

/* Waits for all work, then copies. Ends the program when a kernel failed. */
void device_read(void* host, const void* device, size_t bytes);

#endif /* DEVICE_H_ */
