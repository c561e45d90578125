/* The loops of cpu_dropout.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. */

TD__VECTOR
static void NAME(keep_blocks)(REAL *restrict to, const REAL *restrict from,
                              const unsigned char *restrict keep, int64_t blocks, int64_t block,
                              REAL factor)
{
    if (block == 1) {
        for (int64_t i = 0; i < blocks; i++)
            to[i] = from[i] * (keep[i] ? factor : 0);
        return;
    }
    for (int64_t i = 0; i < blocks && block; i++, to += block, from += block) {
        REAL times = keep[i] ? factor : 0;
        for (int64_t j = 0; j < block; j++)
            to[j] = from[j] * times;
    }
}
