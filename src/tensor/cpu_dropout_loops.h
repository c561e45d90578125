/* The loops of cpu_dropout.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. */

TD__VECTOR
static void NAME(keep_blocks)(void *arg, int64_t begin, int64_t end)
{
    const struct dropout *k = arg;
    int64_t block = k->block;
    REAL *restrict to = (REAL *)k->to + begin * block;
    const REAL *restrict from = (const REAL *)k->from + begin * block;
    const unsigned char *restrict keep = k->keep + begin;
    REAL factor = (REAL)k->factor;
    if (block == 1) {
        for (int64_t i = 0; i < end - begin; i++)
            to[i] = from[i] * (keep[i] ? factor : 0);
        return;
    }
    for (int64_t i = 0; i < end - begin && block; i++, to += block, from += block) {
        REAL times = keep[i] ? factor : 0;
        for (int64_t j = 0; j < block; j++)
            to[j] = from[j] * times;
    }
}
