/* The loops of cpu_norm.c for one type, with REAL and NAME() of real_f32.h or real_f64.h: the sum of a block of up to
 * TD__NORM_BLOCK elements. PARTS partial sums in f64, of the elements that are PARTS apart, from the first one on, are
 * added by halves; what is missing in a short block counts as 0. */

TD__VECTOR static double NAME(sum_squares)(const REAL *x)
{
    double sums[PARTS];
    for (int k = 0; k < PARTS; k++)
        sums[k] = (double)x[k] * (double)x[k];
    for (const REAL *row = x + PARTS; row < x + TD__NORM_BLOCK; row += PARTS) {
        KEEP_ROWS_APART();
        for (int k = 0; k < PARTS; k++)
            sums[k] += (double)row[k] * (double)row[k];
    }
    return add_parts(sums);
}

TD__VECTOR static double NAME(sum_sizes)(const REAL *x)
{
    double sums[PARTS];
    for (int k = 0; k < PARTS; k++)
        sums[k] = (double)REAL_FABS(x[k]);
    for (const REAL *row = x + PARTS; row < x + TD__NORM_BLOCK; row += PARTS) {
        KEEP_ROWS_APART();
        for (int k = 0; k < PARTS; k++)
            sums[k] += (double)REAL_FABS(row[k]);
    }
    return add_parts(sums);
}

static double NAME(sum_powers)(const REAL *x, double power)
{
    double sums[PARTS] = {0};
    for (int i = 0; i < TD__NORM_BLOCK; i++)
        sums[i % PARTS] += pow(fabs((double)x[i]), power);
    return add_parts(sums);
}

TD__VECTOR static double NAME(greatest)(const REAL *x)
{
    REAL greatest = 0, spoiled = 0;
    for (int64_t i = 0; i < TD__NORM_BLOCK; i++) {
        REAL size = x[i] < 0 ? -x[i] : x[i];
        greatest = size > greatest ? size : greatest;
        spoiled = x[i] != x[i] ? 1 : spoiled;
    }
    return spoiled != 0 ? (double)NAN : (double)greatest;
}

/* `count` elements; a short block is filled with zeros. */
static double NAME(measure_block)(const REAL *x, int64_t count, double power)
{
    REAL whole[TD__NORM_BLOCK];
    if (count < TD__NORM_BLOCK) {
        memcpy(whole, x, (size_t)count * sizeof *x);
        memset(whole + count, 0, (size_t)(TD__NORM_BLOCK - count) * sizeof *x);
        x = whole;
    }
    return isinf(power) ? NAME(greatest)(x)
           : power == 2 ? NAME(sum_squares)(x)
           : power == 1 ? NAME(sum_sizes)(x)
                        : NAME(sum_powers)(x, power);
}
