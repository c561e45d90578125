/* The loops between pictures and columns, for one type of elements: REAL and NAMED() are the
 * includer's. See conv.h. */

/* Output pixels that stand side by side in a row: `count` of them from (y, x) on. */
struct NAMED(run) {
    int64_t y, x;
    int64_t count;
};

static inline struct NAMED(run)
    NAMED(run_at)(const struct td__conv *conv, int64_t pixel, int64_t left)
{
    struct NAMED(run) run = {.y = pixel / conv->out_width, .x = pixel % conv->out_width};
    run.count = conv->out_width - run.x < left ? conv->out_width - run.x : left;
    return run;
}

/* Which of `count` pixels, `stride` apart from `at` on, are inside 0 … size - 1: first … end - 1. */
static inline void NAMED(inside)(int64_t at, int64_t stride, int64_t size, int64_t count,
                                 int64_t *first, int64_t *end)
{
    int64_t low = at >= 0 ? 0 : (-at + stride - 1) / stride;
    int64_t high = at >= size ? 0 : (size - at + stride - 1) / stride;
    *first = low < count ? low : count;
    *end = high < count ? high : count;
    if (*end < *first)
        *end = *first;
}

/* What lies under one place of the kernel, for a run of pixels. */
static inline void NAMED(take)(const struct td__conv *conv, const REAL *picture, int64_t ky,
                               int64_t kx, const struct NAMED(run) * run, REAL *restrict to)
{
    const struct td__window *w = &conv->window;
    int64_t y = run->y * w->stride[0] - w->padding[0] + ky * w->dilation[0];
    int64_t x = run->x * w->stride[1] - w->padding[1] + kx * w->dilation[1];
    int64_t first = 0, end = 0;
    if (y >= 0 && y < conv->height)
        NAMED(inside)(x, w->stride[1], conv->width, run->count, &first, &end);
    for (int64_t i = 0; i < first; i++)
        to[i] = 0;
    const REAL *from = picture + y * conv->width + x;
    if (w->stride[1] == 1)
        for (int64_t i = first; i < end; i++)
            to[i] = from[i];
    else
        for (int64_t i = first; i < end; i++)
            to[i] = from[i * w->stride[1]];
    for (int64_t i = end; i < run->count; i++)
        to[i] = 0;
}

TD__VECTOR void NAMED(td__conv_columns)(const struct td__gemm *gemm,
                                        const struct td__gemm_part *part, int64_t width,
                                        void *packed)
{
    const struct td__conv *conv = gemm->b;
    const int64_t kernel = conv->window.kernel[0] * conv->window.kernel[1];
    const REAL *x = (const REAL *)conv->x + part->item * conv->x_picture;
    for (int64_t done = 0; done < part->columns;) {
        struct NAMED(run) run = NAMED(run_at)(conv, part->n0 + done, part->columns - done);
        REAL *to = (REAL *)packed + done;
        for (int64_t k = part->k0; k < part->k0 + part->rows; k++, to += width) {
            const REAL *picture = x + k / kernel * conv->height * conv->width;
            int64_t place = k % kernel;
            NAMED(take)
            (conv, picture, place / conv->window.kernel[1], place % conv->window.kernel[1], &run,
             to);
        }
        done += run.count;
    }
    for (int64_t p = 0; p < part->rows && part->columns < width; p++)
        for (int64_t j = part->columns; j < width; j++)
            ((REAL *)packed)[p * width + j] = 0;
}

TD__VECTOR void NAMED(td__conv_rows)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                                     int64_t width, void *packed)
{
    const struct td__conv *conv = gemm->b;
    const struct td__window *w = &conv->window;
    const REAL *x = (const REAL *)conv->x + part->item * conv->x_picture;
    for (int64_t p = 0; p < part->rows; p++) {
        int64_t pixel = part->k0 + p;
        int64_t y0 = pixel / conv->out_width * w->stride[0] - w->padding[0];
        int64_t x0 = pixel % conv->out_width * w->stride[1] - w->padding[1];
        REAL *to = (REAL *)packed + p * width;
        int64_t kx = part->n0 % w->kernel[1], rest = part->n0 / w->kernel[1];
        int64_t ky = rest % w->kernel[0], channel = rest / w->kernel[0];
        for (int64_t j = 0; j < part->columns; j++) {
            int64_t y = y0 + ky * w->dilation[0], at = x0 + kx * w->dilation[1];
            bool inside = y >= 0 && y < conv->height && at >= 0 && at < conv->width;
            to[j] = inside ? x[(channel * conv->height + y) * conv->width + at] : 0;
            if (++kx == w->kernel[1]) {
                kx = 0;
                if (++ky == w->kernel[0]) {
                    ky = 0;
                    channel++;
                }
            }
        }
        for (int64_t j = part->columns; j < width; j++)
            to[j] = 0;
    }
}

TD__VECTOR void NAMED(td__conv_add)(const struct td__conv *conv, const struct td__conv_piece *piece,
                                    const REAL *columns, REAL *x)
{
    const struct td__window *w = &conv->window;
    for (int64_t c = piece->c0; c < piece->c0 + piece->channels; c++)
        for (int64_t ky = 0; ky < w->kernel[0]; ky++)
            for (int64_t kx = 0; kx < w->kernel[1]; kx++)
                for (int64_t row = 0; row < piece->rows; row++, columns += conv->out_width) {
                    int64_t y = (piece->y0 + row) * w->stride[0] - w->padding[0] +
                                ky * w->dilation[0];
                    int64_t at = kx * w->dilation[1] - w->padding[1];
                    if (y < 0 || y >= conv->height)
                        continue;
                    int64_t first, end;
                    NAMED(inside)(at, w->stride[1], conv->width, conv->out_width, &first, &end);
                    REAL *restrict to = x + (c * conv->height + y) * conv->width + at;
                    if (w->stride[1] == 1)
                        for (int64_t i = first; i < end; i++)
                            to[i] += columns[i];
                    else
                        for (int64_t i = first; i < end; i++)
                            to[i * w->stride[1]] += columns[i];
                }
}

#undef REAL
#undef NAMED
