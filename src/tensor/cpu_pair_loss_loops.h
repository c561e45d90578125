/* The loops of cpu_pair_loss.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. */

/* out[i] = loss * scale. */
TD__INLINE void NAME(pair_piece)(td_pair_loss loss, REAL *restrict out,
                                 const REAL *restrict x, const REAL *restrict y, int64_t n,
                                 REAL scale)
{
    switch (loss) {
    case TD_PAIR_LOSS_MSE:
        for (int64_t i = 0; i < n; i++)
            out[i] = (x[i] - y[i]) * (x[i] - y[i]) * scale;
        break;
    case TD_PAIR_LOSS_L1:
        for (int64_t i = 0; i < n; i++)
            out[i] = REAL_FABS(x[i] - y[i]) * scale;
        break;
    case TD_PAIR_LOSS_BCE_LOGITS:
        for (int64_t i = 0; i < n; i++)
            out[i] = ((x[i] < 0 ? 0 : x[i]) - x[i] * y[i] +
                      REAL_LOG1P(REAL_EXP(-REAL_FABS(x[i])))) *
                     scale;
        break;
    }
}

/* One result an element. */
TD__VECTOR
static void NAME(pair_each)(void *arg, int64_t begin, int64_t end)
{
    const struct pair_loss *k = arg;
    NAME(pair_piece)
    (k->loss, (REAL *)k->out + begin, (const REAL *)k->x + begin, (const REAL *)k->y + begin,
     end - begin, (REAL)k->scale);
}

/* The sums of blocks of PIECES pieces. */
TD__VECTOR
static void NAME(pair_sums)(void *arg, int64_t begin, int64_t end)
{
    const struct pair_loss *k = arg;
    for (int64_t block = begin; block < end; block++) {
        int64_t last = (block + 1) * PIECES * PIECE;
        double sum = 0;
        for (int64_t i = block * PIECES * PIECE; i < last && i < k->n; i += PIECE) {
            REAL piece[PIECE];
            int64_t count = k->n - i < PIECE ? k->n - i : PIECE;
            NAME(pair_piece)
            (k->loss, piece, (const REAL *)k->x + i, (const REAL *)k->y + i, count, 1);
            sum += (double)NAME(sum)(piece, count);
        }
        k->sums[block] = sum;
    }
}

/* gx[i] = g * derivative, where g is gy[i] * scale with `each`, otherwise gy[0] * scale. */
TD__VECTOR
static void NAME(pair_grad)(void *arg, int64_t begin, int64_t end)
{
    const struct pair_loss *k = arg;
    REAL *restrict gx = (REAL *)k->out + begin;
    const REAL *restrict x = (const REAL *)k->x + begin, *restrict y = (const REAL *)k->y + begin;
    const REAL *restrict gy = (const REAL *)k->grad_y + (k->each ? begin : 0);
    int64_t n = end - begin;
    REAL factor = k->each ? (REAL)k->scale : gy[0] * (REAL)k->scale;
    switch (k->loss) {
    case TD_PAIR_LOSS_MSE:
        for (int64_t i = 0; i < n; i++)
            gx[i] = 2 * (x[i] - y[i]) * factor;
        break;
    case TD_PAIR_LOSS_L1:
        for (int64_t i = 0; i < n; i++) {
            REAL d = x[i] - y[i];
            REAL sign = d > 0 ? 1 : d < 0 ? -1 : d; /* 0, or NaN */
            gx[i] = sign * factor;
        }
        break;
    case TD_PAIR_LOSS_BCE_LOGITS:
        for (int64_t i = 0; i < n; i++)
            gx[i] = (1 / (1 + REAL_EXP(-x[i])) - y[i]) * factor;
        break;
    }
    if (k->each)
        for (int64_t i = 0; i < n; i++)
            gx[i] *= gy[i];
}
