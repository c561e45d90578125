/* CRC-32C (Castagnoli): a checksum against damage, not against attack, at the speed of memory where the processor has an
 * instruction for it. */
#ifndef TD_CHECKPOINT_CRC32C_H
#define TD_CHECKPOINT_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/** The checksum of `size` bytes that follow those of `crc`; 0 at the beginning. */
uint32_t td__crc32c(uint32_t crc, const void *data, size_t size);

/** The same without the instruction. */
uint32_t td__crc32c_generic(uint32_t crc, const void *data, size_t size);

#endif
