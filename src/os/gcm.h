/* AES-128-GCM for records of TLS 1.3: a text and one more byte (the type of its content) under one nonce.
 *
 * OpenSSL computes it. Where the processor has AES instructions for 512-bit registers and the library is older than 3.1,
 * which does not know them, gcm_avx512.c does: three times as fast. Neither has branches or addresses that depend on
 * keys or data. */
#ifndef TD_OS_GCM_H
#define TD_OS_GCM_H

#include <stdalign.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TD__GCM_KEY = 16, TD__GCM_NONCE = 12, TD__GCM_TAG = 16, TD__GCM_POWERS = 32 };

/* Key schedules. The powers of the hash key are in descending order: a group of n blocks is multiplied by the last n.
 * Zeros follow them, by which the lanes behind the last block are multiplied. */
struct td__gcm {
    alignas(64) uint8_t powers[TD__GCM_POWERS + 3][16];
    alignas(64) uint8_t halves[TD__GCM_POWERS + 3][16]; /* the sum of the halves of each */
    uint8_t round_keys[11][16];
    void *evp; /* of OpenSSL; NULL: the tables above are used */
};

/** Who computes. */
enum td__gcm_kind { TD__GCM_BEST, TD__GCM_OPENSSL, TD__GCM_AVX512 };

/** Whether the processor can. */
bool td__gcm_has_avx512(void);

/** False where there is no memory. */
bool td__gcm_init(struct td__gcm *gcm, enum td__gcm_kind kind, const uint8_t key[TD__GCM_KEY]);
void td__gcm_free(struct td__gcm *gcm);

/** The 5 bytes of `header` are authenticated, too. */
struct td__gcm_record {
    uint8_t nonce[TD__GCM_NONCE];
    const uint8_t *header;
};

/** Encrypts `size` bytes and `type` to `out`: size + 1 bytes, and the tag. False: OpenSSL has failed. */
bool td__gcm_seal(struct td__gcm *gcm, const struct td__gcm_record *record, const uint8_t *in,
                  size_t size, uint8_t type, uint8_t *out);

/** The reverse: `in` has size + 1 bytes and the tag; `out` gets `size` bytes. False where the tag is not right: what
 *  is in `out` must not be used then. */
bool td__gcm_open(struct td__gcm *gcm, const struct td__gcm_record *record, const uint8_t *in,
                  size_t size, uint8_t *type, uint8_t *out);

/* ---- gcm_avx512.c ---------------------------------------------------------------------------- */

void td__gcm_avx512_init(struct td__gcm *gcm, const uint8_t key[TD__GCM_KEY]);

/** Encrypts or decrypts, and computes the tag. The last byte of the text is *last. */
void td__gcm_avx512_run(const struct td__gcm *gcm, const struct td__gcm_record *record, bool seal,
                        const uint8_t *in, size_t size, uint8_t *last, uint8_t *out,
                        uint8_t tag[TD__GCM_TAG]);

#endif
