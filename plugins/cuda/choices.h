/* Algorithms that were measured to be the fastest, kept on disk, so that the next run makes the same choice, computes
 * the same bits, and starts fast.
 *
 * The files are in $TANDEM_CACHE_DIR, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem: one for a model of GPU, the version
 * of the driver, and a library. TANDEM_CACHE_DIR=none keeps nothing. */
#ifndef CHOICES_H
#define CHOICES_H

#include "cuda/cuda_device.h"

/** Copies the choice stored for a key to `value`; false where there is none (of that size). `library` names library and
 *  version, such as "cublasLt 130100". Keys and values have no padding; see choice_file.h for the largest ones. */
bool td__cuda_choice_get(const struct cuda_device *device, const char *library, const void *key,
                         size_t key_size, void *value, size_t value_size);

/** Stores one, in memory and on disk. A disk that fails costs speed only: logged once. */
void td__cuda_choice_put(const struct cuda_device *device, const char *library, const void *key,
                         size_t key_size, const void *value, size_t value_size);

/** Around measuring: of several processes one measures, and the others wait for it, ten seconds at most, and find its choice
 *  by td__cuda_choice_get() after the lock. Between the two the caller may wait only for its own work on the GPU: it
 *  synchronises the stream before it locks, for a collective that is enqueued there may wait for a process that
 *  waits for this lock. */
void td__cuda_choice_lock(const struct cuda_device *device, const char *library);
void td__cuda_choice_unlock(const struct cuda_device *device, const char *library);

/** Whether algorithms are measured at all: not with TANDEM_CUDA_TUNE=0. */
bool td__cuda_may_measure(void);

/** Whether results have the same bits each time: not with TANDEM_CUDA_DETERMINISTIC=0. */
bool td__cuda_is_deterministic(void);

/** How many milliseconds measuring one shape may take: TANDEM_CUDA_TUNE, or `otherwise`. */
double td__cuda_measuring_ms(double otherwise);

#endif
