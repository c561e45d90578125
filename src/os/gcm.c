/* AES-128-GCM by OpenSSL, and who computes; see gcm.h. */
#include "os/gcm.h"

#include "base/simd.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <string.h>

enum { HEADER = 5, SINCE_3_1 = 0x30100000 };

#if defined(__x86_64__)
#include <cpuid.h>

bool td__gcm_has_avx512(void)
{
    unsigned a, b, c, d;
    return td__simd_has(TD__SIMD_AVX512) && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           c & bit_VAES && c & bit_VPCLMULQDQ && __get_cpuid(1, &a, &b, &c, &d) && c & bit_AES &&
           c & bit_PCLMUL;
}
#else
bool td__gcm_has_avx512(void)
{
    return false;
}

void td__gcm_avx512_init(struct td__gcm *gcm, const uint8_t key[TD__GCM_KEY])
{
    (void)gcm;
    (void)key;
}

void td__gcm_avx512_run(const struct td__gcm *gcm, const struct td__gcm_record *record, bool seal,
                        const uint8_t *in, size_t size, uint8_t *last, uint8_t *out,
                        uint8_t tag[TD__GCM_TAG])
{
    (void)gcm, (void)record, (void)seal, (void)in, (void)size, (void)last, (void)out, (void)tag;
}
#endif

bool td__gcm_init(struct td__gcm *gcm, enum td__gcm_kind kind, const uint8_t key[TD__GCM_KEY])
{
    bool best = td__simd() == TD__SIMD_AVX512 && td__gcm_has_avx512() &&
                OpenSSL_version_num() < SINCE_3_1;
    memset(gcm, 0, sizeof *gcm);
    if (kind == TD__GCM_AVX512 || (kind == TD__GCM_BEST && best)) {
        td__gcm_avx512_init(gcm, key);
        return true;
    }
    gcm->evp = EVP_CIPHER_CTX_new();
    if (gcm->evp && EVP_CipherInit_ex(gcm->evp, EVP_aes_128_gcm(), NULL, key, NULL, 1) == 1)
        return true;
    td__gcm_free(gcm);
    return false;
}

void td__gcm_free(struct td__gcm *gcm)
{
    EVP_CIPHER_CTX_free(gcm->evp);
    OPENSSL_cleanse(gcm, sizeof *gcm);
}

/* Text and last byte, without the tag. */
static bool run_evp(EVP_CIPHER_CTX *evp, const struct td__gcm_record *record, bool seal,
                    const uint8_t *in, size_t size, uint8_t *last, uint8_t *out)
{
    int done;
    return EVP_CipherInit_ex(evp, NULL, NULL, NULL, record->nonce, seal) == 1 &&
           EVP_CipherUpdate(evp, NULL, &done, record->header, HEADER) == 1 &&
           (!size || EVP_CipherUpdate(evp, out, &done, in, (int)size) == 1) &&
           EVP_CipherUpdate(evp, last, &done, seal ? last : in + size, 1) == 1;
}

bool td__gcm_seal(struct td__gcm *gcm, const struct td__gcm_record *record, const uint8_t *in,
                  size_t size, uint8_t type, uint8_t *out)
{
    uint8_t *tag = out + size + 1, none[16];
    int done;
    bool right = true;
    if (!gcm->evp)
        td__gcm_avx512_run(gcm, record, true, in, size, &type, out, tag);
    else
        right = run_evp(gcm->evp, record, true, in, size, &type, out) &&
                EVP_CipherFinal_ex(gcm->evp, none, &done) == 1 &&
                EVP_CIPHER_CTX_ctrl(gcm->evp, EVP_CTRL_AEAD_GET_TAG, TD__GCM_TAG, tag) == 1;
    out[size] = type;
    return right;
}

bool td__gcm_open(struct td__gcm *gcm, const struct td__gcm_record *record, const uint8_t *in,
                  size_t size, uint8_t *type, uint8_t *out)
{
    uint8_t tag[TD__GCM_TAG], none[16];
    const uint8_t *theirs = in + size + 1;
    int done;
    *type = in[size];
    if (!gcm->evp) {
        td__gcm_avx512_run(gcm, record, false, in, size, type, out, tag);
        return CRYPTO_memcmp(tag, theirs, sizeof tag) == 0;
    }
    memcpy(tag, theirs, sizeof tag);
    return run_evp(gcm->evp, record, false, in, size, type, out) &&
           EVP_CIPHER_CTX_ctrl(gcm->evp, EVP_CTRL_AEAD_SET_TAG, TD__GCM_TAG, tag) == 1 &&
           EVP_CipherFinal_ex(gcm->evp, none, &done) == 1;
}
