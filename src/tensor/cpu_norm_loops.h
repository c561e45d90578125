/* The loops of cpu_norm.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. Partial sums are in f64, always
 * in the same order. */

enum { NAME(SUMS) = 16 };

TD__VECTOR static double NAME(sum_squares)(const REAL *x, int64_t count)
{
    double sums[NAME(SUMS)] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + NAME(SUMS) <= count; i += NAME(SUMS))
        for (int k = 0; k < NAME(SUMS); k++)
            sums[k] += (double)x[i + k] * (double)x[i + k];
    for (; i < count; i++)
        sum += (double)x[i] * (double)x[i];
    for (int k = 0; k < NAME(SUMS); k++)
        sum += sums[k];
    return sum;
}

TD__VECTOR static double NAME(greatest)(const REAL *x, int64_t count)
{
    REAL greatest = 0, spoiled = 0;
    for (int64_t i = 0; i < count; i++) {
        REAL size = x[i] < 0 ? -x[i] : x[i];
        greatest = size > greatest ? size : greatest;
        spoiled = x[i] != x[i] ? 1 : spoiled;
    }
    return spoiled != 0 ? (double)NAN : (double)greatest;
}

static double NAME(sum_powers)(const REAL *x, int64_t count, double power)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += pow(fabs((double)x[i]), power);
    return sum;
}
