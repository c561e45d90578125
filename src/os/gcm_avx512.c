/* AES-128-GCM with instructions for four blocks at a time (VAES, VPCLMULQDQ); see gcm.h.
 *
 *     text block i  ^  AES(nonce | 2 + i)  =  ciphertext block C_i
 *     hash = (…((A·H ^ C_0)·H ^ C_1)·H … ^ lengths)·H;   tag = hash ^ AES(nonce | 1)
 *
 * 32 blocks are encrypted, or decrypted, at a time. Their share of the hash is C_0·H^32 ^ C_1·H^31 … ^ C_31·H: products of
 * 256 bits are added up, and reduced once. A product takes three multiplications of halves (Karatsuba): some processors
 * do one of these in the time of four rounds of AES.
 *
 * GCM numbers the bits of a block from the most significant one of its first byte. With the bytes reversed, a product of
 * two polynomials is the carry-less product of their numbers shifted by one bit, which is in the hash key already (H·x).
 * It is reduced from below, 64 bits at a time, by x^128 + x^127 + x^126 + x^121 + 1 (RFC 8452, appendix A). */
#include "os/gcm.h"

#include <immintrin.h>
#include <openssl/crypto.h>
#include <string.h>

enum {
    WIDE = 8,          /* registers of four blocks in a group … */
    GROUP = WIDE * 64, /* … and its bytes */
    ROUNDS = 10,
};

#define INLINE static inline __attribute__((always_inline))

/* ---- The hash -------------------------------------------------------------------------------- */

/* A sum of products that is not reduced yet: of low halves, of high halves, and of sums of both halves. */
struct sum {
    __m512i low, both, high;
};

INLINE __m512i reversed(__m512i blocks)
{
    const __m128i order = _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_shuffle_epi8(blocks, _mm512_broadcast_i32x4(order));
}

INLINE __m128i reversed_block(__m128i block)
{
    return _mm512_castsi512_si128(reversed(_mm512_zextsi128_si512(block)));
}

/* The sum of the halves of each block, in both. */
INLINE __m512i halves_of(__m512i blocks)
{
    return _mm512_xor_si512(blocks, _mm512_shuffle_epi32(blocks, _MM_PERM_BADC));
}

INLINE struct sum no_sum(void)
{
    return (struct sum){_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
}

INLINE struct sum products(__m512i a, __m512i b, __m512i halves_of_b)
{
    return (struct sum){_mm512_clmulepi64_epi128(a, b, 0x00),
                        _mm512_clmulepi64_epi128(halves_of(a), halves_of_b, 0x00),
                        _mm512_clmulepi64_epi128(a, b, 0x11)};
}

/* Of four blocks, with the powers from `power` on. */
INLINE struct sum powered(const struct td__gcm *gcm, size_t power, __m512i blocks)
{
    return products(blocks, _mm512_loadu_si512(gcm->powers[power]),
                    _mm512_loadu_si512(gcm->halves[power]));
}

INLINE __m512i xor3(__m512i a, __m512i b, __m512i c)
{
    return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}

INLINE void add_both(struct sum *sum, const struct sum *a, const struct sum *b)
{
    sum->low = xor3(sum->low, a->low, b->low);
    sum->both = xor3(sum->both, a->both, b->both);
    sum->high = xor3(sum->high, a->high, b->high);
}

INLINE __m128i folded(__m512i lanes)
{
    __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(lanes),
                                    _mm512_extracti64x4_epi64(lanes, 1));
    return _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* Adds a multiple of the polynomial that clears the lower 64 bits, and shifts them out; twice. */
INLINE __m128i reduced(const struct sum *sum)
{
    const __m128i polynomial = _mm_set_epi64x((int64_t)0xc200000000000000, 0);
    __m128i low = folded(sum->low), high = folded(sum->high);
    __m128i middle = _mm_xor_si128(folded(sum->both), _mm_xor_si128(low, high));
    middle = _mm_xor_si128(middle, _mm_clmulepi64_si128(polynomial, low, 0x01));
    middle = _mm_xor_si128(middle, _mm_shuffle_epi32(low, 0x4e));
    high = _mm_xor_si128(high, _mm_clmulepi64_si128(polynomial, middle, 0x01));
    return _mm_xor_si128(high, _mm_shuffle_epi32(middle, 0x4e));
}

INLINE __m128i product(__m128i a, __m128i b)
{
    __m512i wide = _mm512_zextsi128_si512(b);
    struct sum sum = products(_mm512_zextsi128_si512(a), wide, halves_of(wide));
    return reduced(&sum);
}

/* H·x: a shift by one bit, and the polynomial where a bit falls off. */
static __m128i times_x(__m128i h)
{
    const __m128i polynomial = _mm_set_epi64x((int64_t)0xc200000000000000, 1);
    __m128i carries = _mm_srli_epi64(h, 63);
    __m128i shifted = _mm_or_si128(_mm_slli_epi64(h, 1), _mm_slli_si128(carries, 8));
    __m128i fallen = _mm_shuffle_epi32(_mm_sub_epi64(_mm_setzero_si128(), carries), 0xee);
    return _mm_xor_si128(shifted, _mm_and_si128(fallen, polynomial));
}

/* ---- AES ------------------------------------------------------------------------------------- */

INLINE __m128i next_key(__m128i key, __m128i assist)
{
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, _mm_shuffle_epi32(assist, 0xff));
}

static void expand_key(struct td__gcm *gcm, const uint8_t key[TD__GCM_KEY])
{
    __m128i keys[ROUNDS + 1];
    keys[0] = _mm_loadu_si128((const __m128i *)key);
    keys[1] = next_key(keys[0], _mm_aeskeygenassist_si128(keys[0], 0x01));
    keys[2] = next_key(keys[1], _mm_aeskeygenassist_si128(keys[1], 0x02));
    keys[3] = next_key(keys[2], _mm_aeskeygenassist_si128(keys[2], 0x04));
    keys[4] = next_key(keys[3], _mm_aeskeygenassist_si128(keys[3], 0x08));
    keys[5] = next_key(keys[4], _mm_aeskeygenassist_si128(keys[4], 0x10));
    keys[6] = next_key(keys[5], _mm_aeskeygenassist_si128(keys[5], 0x20));
    keys[7] = next_key(keys[6], _mm_aeskeygenassist_si128(keys[6], 0x40));
    keys[8] = next_key(keys[7], _mm_aeskeygenassist_si128(keys[7], 0x80));
    keys[9] = next_key(keys[8], _mm_aeskeygenassist_si128(keys[8], 0x1b));
    keys[10] = next_key(keys[9], _mm_aeskeygenassist_si128(keys[9], 0x36));
    memcpy(gcm->round_keys, keys, sizeof gcm->round_keys);
    OPENSSL_cleanse(keys, sizeof keys);
}

INLINE __m128i round_key(const struct td__gcm *gcm, int round)
{
    return _mm_loadu_si128((const __m128i *)gcm->round_keys[round]);
}

static __m128i encrypted_block(const struct td__gcm *gcm, __m128i block)
{
    block = _mm_xor_si128(block, round_key(gcm, 0));
    for (int round = 1; round < ROUNDS; round++)
        block = _mm_aesenc_si128(block, round_key(gcm, round));
    return _mm_aesenclast_si128(block, round_key(gcm, ROUNDS));
}

/* The next four blocks of counters, which are numbers of this processor. */
INLINE __m512i next_blocks(__m512i *counters)
{
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i blocks = _mm512_shuffle_epi8(*counters, _mm512_broadcast_i32x4(swap));
    *counters = _mm512_add_epi32(*counters, _mm512_broadcast_i32x4(_mm_set_epi32(4, 0, 0, 0)));
    return blocks;
}

INLINE __m512i wide_key(const struct td__gcm *gcm, int round)
{
    return _mm512_broadcast_i32x4(round_key(gcm, round));
}

/* ---- Records --------------------------------------------------------------------------------- */

/* Two of the registers of a group. They are added from the last ones on: the hash before them, which is computed last, is
 * needed last. */
INLINE void add_pair(struct sum *sum, const struct td__gcm *gcm, const __m512i *ciphertext, int i,
                     __m128i hash)
{
    __m512i first = reversed(ciphertext[i]), second = reversed(ciphertext[i + 1]);
    if (i == 0)
        first = _mm512_xor_si512(first, _mm512_zextsi128_si512(hash));
    struct sum a = powered(gcm, 4 * (size_t)i, first);
    struct sum b = powered(gcm, 4 * (size_t)i + 4, second);
    add_both(sum, &a, &b);
}

/* A group; what is to be hashed is in `ciphertext`, or in `in` when it is decrypted. Returns the next hash. */
INLINE __m128i run_group(const struct td__gcm *gcm, __m128i hash, __m512i *counters,
                         const uint8_t *in, uint8_t *out, __m512i *ciphertext, bool seal,
                         bool hashes)
{
    struct sum sum = no_sum();
    __m512i stream[WIDE], key = wide_key(gcm, 0);
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; i++)
        stream[i] = _mm512_xor_si512(next_blocks(counters), key);
#pragma GCC unroll 9
    for (int round = 1; round < ROUNDS; round++) {
        key = wide_key(gcm, round);
#pragma GCC unroll 8
        for (int i = 0; i < WIDE; i++)
            stream[i] = _mm512_aesenc_epi128(stream[i], key);
        int i = WIDE - round;
        if (i < 0 || i % 2 || !hashes)
            continue;
        if (!seal) {
            ciphertext[i] = _mm512_loadu_si512(in + 64 * i);
            ciphertext[i + 1] = _mm512_loadu_si512(in + 64 * i + 64);
        }
        add_pair(&sum, gcm, ciphertext, i, hash);
    }
    key = wide_key(gcm, ROUNDS);
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; i++) {
        __m512i before = _mm512_loadu_si512(in + 64 * i);
        __m512i after = _mm512_xor_si512(_mm512_aesenclast_epi128(stream[i], key), before);
        _mm512_storeu_si512(out + 64 * i, after);
        if (seal)
            ciphertext[i] = after;
    }
    return hashes ? reduced(&sum) : hash;
}

/* Whole groups. While one is encrypted, the ciphertext of the last one is hashed: the processor has nothing to wait for.
 * Of a group that is decrypted the ciphertext is there already. */
INLINE __m128i run_groups(const struct td__gcm *gcm, __m128i hash, __m512i *counters,
                          const uint8_t *in, uint8_t *out, size_t groups, bool seal)
{
    __m512i ciphertext[WIDE];
    if (!groups)
        return hash;
    hash = run_group(gcm, hash, counters, in, out, ciphertext, seal, !seal);
    for (size_t at = GROUP; at < groups * GROUP; at += GROUP)
        hash = run_group(gcm, hash, counters, in + at, out + at, ciphertext, seal, true);
    if (!seal)
        return hash;
    struct sum sum = no_sum();
#pragma GCC unroll 4
    for (int i = WIDE - 2; i >= 0; i -= 2)
        add_pair(&sum, gcm, ciphertext, i, hash);
    return reduced(&sum);
}

/* The last 1 to GROUP bytes, which are in `text`; zeros follow them. */
static __m128i run_rest(const struct td__gcm *gcm, __m128i hash, __m512i *counters, uint8_t *text,
                        size_t size, bool seal)
{
    struct sum sum = no_sum(), none = no_sum();
    size_t blocks = (size + 15) / 16;
    size_t power = TD__GCM_POWERS - blocks;
    for (size_t at = 0; at < size; at += 64, power += 4) {
        size_t left = size - at;
        __mmask64 inside = left < 64 ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
        __m512i stream = _mm512_xor_si512(next_blocks(counters), wide_key(gcm, 0));
        for (int round = 1; round < ROUNDS; round++)
            stream = _mm512_aesenc_epi128(stream, wide_key(gcm, round));
        stream = _mm512_aesenclast_epi128(stream, wide_key(gcm, ROUNDS));
        __m512i before = _mm512_maskz_loadu_epi8(inside, text + at);
        __m512i after = _mm512_maskz_mov_epi8(inside, _mm512_xor_si512(before, stream));
        __m512i hashed = reversed(seal ? after : before);
        if (!at)
            hashed = _mm512_xor_si512(hashed, _mm512_zextsi128_si512(hash));
        struct sum next = powered(gcm, power, hashed);
        add_both(&sum, &next, &none);
        _mm512_mask_storeu_epi8(text + at, inside, after);
    }
    return reduced(&sum);
}

void td__gcm_avx512_run(const struct td__gcm *gcm, const struct td__gcm_record *record, bool seal,
                        const uint8_t *in, size_t size, uint8_t *last, uint8_t *out,
                        uint8_t tag[TD__GCM_TAG])
{
    uint8_t block[16] = {0}, rest[GROUP];
    const __m128i h = _mm_load_si128((const __m128i *)gcm->powers[TD__GCM_POWERS - 1]);
    memcpy(block, record->header, 5);
    __m128i hash = product(reversed_block(_mm_loadu_si128((const __m128i *)block)), h);
    memcpy(block, record->nonce, TD__GCM_NONCE);
    memset(block + TD__GCM_NONCE, 0, 4);
    __m128i nonce = _mm_loadu_si128((const __m128i *)block);
    __m512i counters = _mm512_add_epi32(
        _mm512_broadcast_i32x4(nonce),
        _mm512_set_epi32(5, 0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0));

    size_t whole = size / GROUP * GROUP, left = size - whole;
    hash = seal ? run_groups(gcm, hash, &counters, in, out, whole / GROUP, true)
                : run_groups(gcm, hash, &counters, in, out, whole / GROUP, false);
    memcpy(rest, in + whole, left);
    rest[left] = *last;
    hash = run_rest(gcm, hash, &counters, rest, left + 1, seal);
    memcpy(out + whole, rest, left);
    *last = rest[left];

    __m128i bits = _mm_set_epi64x(5 * 8, (int64_t)(size + 1) * 8);
    hash = product(_mm_xor_si128(hash, bits), h);
    __m128i first = _mm_insert_epi32(nonce, 0x01000000, 3);
    _mm_storeu_si128((__m128i *)tag,
                     _mm_xor_si128(reversed_block(hash), encrypted_block(gcm, first)));
    if (!seal)
        OPENSSL_cleanse(rest, left + 1);
}

void td__gcm_avx512_init(struct td__gcm *gcm, const uint8_t key[TD__GCM_KEY])
{
    expand_key(gcm, key);
    __m128i h = times_x(reversed_block(encrypted_block(gcm, _mm_setzero_si128())));
    __m128i power = h;
    for (int i = TD__GCM_POWERS - 1; i >= 0; i--) {
        __m512i halves = halves_of(_mm512_zextsi128_si512(power));
        _mm_store_si128((__m128i *)gcm->powers[i], power);
        _mm_store_si128((__m128i *)gcm->halves[i], _mm512_castsi512_si128(halves));
        power = product(power, h);
    }
}
