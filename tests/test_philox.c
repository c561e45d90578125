/* Philox against the published vectors of Random123, and how words are counted. */
#include "runner.h"

#include "tensor/philox.h"

#include <string.h>

TEST(philox_vectors_of_random123)
{
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        uint32_t words[4];
        td__philox(vectors[i].counter, vectors[i].key, words);
        CHECK_MEM(words, vectors[i].words, sizeof words);
    }
}

TEST(philox_words_are_numbered)
{
    enum { N = 37 };
    const uint64_t seed = UINT64_C(0x123456789abcdef0), offset = UINT64_C(0xfffffffe);
    uint32_t all[N], part[N];
    td__philox_words(seed, offset, 0, all, N);
    for (int first = 0; first < N; first++)
        for (int count = 0; first + count <= N; count++) {
            td__philox_words(seed, offset, first, part, count);
            CHECK_MEM(part, all + first, (size_t)count * sizeof *all);
        }
    uint32_t block[4];
    /* The third block: the counter's lower word has wrapped around. */
    td__philox((const uint32_t[4]){0, 1, 0, 0}, (const uint32_t[2]){0x9abcdef0, 0x12345678}, block);
    CHECK_MEM(block, all + 8, sizeof block);
}

/* Each rule of random.h, written out for a few elements. */
TEST(philox_numbers_follow_the_rules)
{
    uint32_t w[8];
    td__philox_words(7, 3, 0, w, 8);
    float f32[4];
    td__philox_numbers(&(struct td__distribution){.kind = TD__UNIFORM, .dtype = TD_F32, .range = 1},
                       7, 3, 0, f32, 4);
    double f64[4];
    td__philox_numbers(&(struct td__distribution){.kind = TD__UNIFORM, .dtype = TD_F64, .range = 1},
                       7, 3, 0, f64, 4);
    uint8_t ones[4];
    td__philox_numbers(
        &(struct td__distribution){.kind = TD__BERNOULLI, .dtype = TD_BOOL, .p = 0.4}, 7, 3, 0,
        ones, 4);
    int64_t few[4], many[4];
    td__philox_numbers(
        &(struct td__distribution){
            .kind = TD__INTEGERS, .dtype = TD_I64, .modulus = 10, .base = (uint64_t)-3},
        7, 3, 0, few, 4);
    td__philox_numbers(&(struct td__distribution){.kind = TD__INTEGERS, .dtype = TD_I64}, 7, 3, 0,
                       many, 4);
    for (int i = 0; i < 4; i++) {
        uint64_t bits = (uint64_t)w[2 * i] << 32 | w[2 * i + 1];
        CHECK(f32[i] == (float)(w[i] / 256) / 16777216.0f);
        CHECK(f64[i] == (double)(bits / 2048) / 9007199254740992.0);
        CHECK_EQ(ones[i], w[i] < 0.4 * 4294967296.0);
        CHECK_EQ(few[i], (int64_t)((uint64_t)w[i] * 10 / 4294967296) - 3);
        CHECK_EQ(many[i], (int64_t)bits);
    }
}
