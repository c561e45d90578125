/* Copies through the caches and past them: every alignment, sizes around every change of method. */
#include "base/copy.h"
#include "guarded_memory.h"
#include "reduction_reference.h"
#include "runner.h"

#include <stdio.h>

TEST(copies_of_all_alignments)
{
    static const size_t sizes[] = {0, 1, 63, 64, 65, 4095, 4096, 4097, 4160, 4223, 10000, 70001};
    static unsigned char from[80000];
    uint64_t state = 3;
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (unsigned char)next_random(&state);
    for (size_t s = 0; s < LENGTH(sizes); s++)
        for (size_t shift = 0; shift < 66; shift += shift < 3 || shift > 60 ? 1 : 7)
            for (int past = 0; past < 2; past++) {
                struct guarded to = guarded_make(sizes[s], shift, false);
                td__copy_bytes(to.data, from + shift * 3 % 17, sizes[s], past);
                CHECK_MEM(to.data, from + shift * 3 % 17, sizes[s]);
                CHECK(guarded_is_whole(&to));
                guarded_free(&to);
            }
    struct guarded same = guarded_make(9000, 5, false);
    td__copy_bytes(same.data, same.data, same.size, true);
    CHECK(guarded_is_empty(&same));
    guarded_free(&same);
}

/* Long ones have wider stores, and prefetch. */
TEST(long_copies)
{
    static const size_t sizes[] = {512 * 1024 - 1, 512 * 1024, 512 * 1024 + 1, 600001};
    static unsigned char from[600100];
    uint64_t state = 5;
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (unsigned char)next_random(&state);
    for (size_t s = 0; s < LENGTH(sizes); s++)
        for (size_t shift = 0; shift < 64; shift += 21) {
            struct guarded to = guarded_make(sizes[s], shift, false);
            td__copy_bytes(to.data, from + shift, sizes[s], true);
            CHECK_MEM(to.data, from + shift, sizes[s]);
            CHECK(guarded_is_whole(&to));
            guarded_free(&to);
        }
}

/* Not what all processors of a socket have together. */
TEST(caches_have_the_size_that_the_system_says)
{
    for (int index = 0; index < 8; index++) {
        char path[96];
        int level = 0;
        long kib = 0;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/level", index);
        FILE *file = fopen(path, "r");
        if (!file)
            continue;
        CHECK_EQ(fscanf(file, "%d", &level), 1);
        fclose(file);
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
        file = fopen(path, "r");
        CHECK(file && fscanf(file, "%ldK", &kib) == 1);
        fclose(file);
        if (level > 1 && level < 4)
            CHECK_EQ(td__cache_bytes(level), (size_t)kib * 1024);
    }
}
