/* The loops of cpu_pair_loss.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. */

/* out[i] = loss * scale. */
TD__INLINE void NAME(pair_piece)(enum td__pair_loss loss, REAL *restrict out,
                                 const REAL *restrict x, const REAL *restrict y, int64_t n,
                                 REAL scale)
{
    switch (loss) {
    case TD__LOSS_MSE:
        for (int64_t i = 0; i < n; i++)
            out[i] = (x[i] - y[i]) * (x[i] - y[i]) * scale;
        break;
    case TD__LOSS_L1:
        for (int64_t i = 0; i < n; i++)
            out[i] = REAL_FABS(x[i] - y[i]) * scale;
        break;
    case TD__LOSS_BCE_LOGITS:
        for (int64_t i = 0; i < n; i++)
            out[i] = ((x[i] < 0 ? 0 : x[i]) - x[i] * y[i] +
                      REAL_LOG1P(REAL_EXP(-REAL_FABS(x[i])))) *
                     scale;
        break;
    }
}

/* With `each` one result an element, otherwise their sum. */
TD__VECTOR
static void NAME(pair_loss)(enum td__pair_loss loss, REAL *out, const REAL *x, const REAL *y,
                            int64_t n, double scale, bool each)
{
    if (each) {
        NAME(pair_piece)(loss, out, x, y, n, (REAL)scale);
        return;
    }
    double sum = 0;
    for (int64_t i = 0; i < n; i += PIECE) {
        REAL piece[PIECE];
        int64_t count = n - i < PIECE ? n - i : PIECE;
        NAME(pair_piece)(loss, piece, x + i, y + i, count, 1);
        sum += (double)NAME(sum)(piece, count);
    }
    *out = (REAL)(sum * scale);
}

/* gx[i] = g * derivative, where g is gy[i] * scale with `each`, otherwise gy[0] * scale. */
TD__VECTOR
static void NAME(pair_loss_grad)(enum td__pair_loss loss, REAL *restrict gx,
                                 const REAL *restrict gy, const REAL *restrict x,
                                 const REAL *restrict y, int64_t n, double scale, bool each)
{
    REAL factor = each ? (REAL)scale : gy[0] * (REAL)scale;
    switch (loss) {
    case TD__LOSS_MSE:
        for (int64_t i = 0; i < n; i++)
            gx[i] = 2 * (x[i] - y[i]) * factor;
        break;
    case TD__LOSS_L1:
        for (int64_t i = 0; i < n; i++) {
            REAL d = x[i] - y[i];
            REAL sign = d > 0 ? 1 : d < 0 ? -1 : d; /* 0, or NaN */
            gx[i] = sign * factor;
        }
        break;
    case TD__LOSS_BCE_LOGITS:
        for (int64_t i = 0; i < n; i++)
            gx[i] = (1 / (1 + REAL_EXP(-x[i])) - y[i]) * factor;
        break;
    }
    if (each)
        for (int64_t i = 0; i < n; i++)
            gx[i] *= gy[i];
}
