/* The loops of im2col and col2im, for one type of elements: the includer defines REAL and NAMED(). See
 * conv.h. */

/* ---- From an image with padding, without bounds checks ----------------------------------------- */

/* The image of an item, with its padding. */
static inline const REAL *NAMED(padded)(struct td__conv *conv, int64_t item)
{
    const td_window *w = &conv->window;
    const REAL *x = (const REAL *)conv->x + item * conv->x_image;
    if (w->padding[0] == 0 && w->padding[1] == 0 && item < conv->images - 1)
        return x;
    for (int64_t c = 0; c < conv->channels && conv->padded_item != item; c++)
        for (int64_t y = 0; y < conv->height; y++) {
            int64_t row = c * conv->padded_height + y + w->padding[0];
            memcpy((REAL *)conv->padded + row * conv->padded_width + w->padding[1],
                   x + (c * conv->height + y) * conv->width, (size_t)conv->width * sizeof *x);
        }
    conv->padded_item = item;
    return conv->padded;
}

/* Contiguous elements at `from` in the image, which go to `at` in a row. */
struct NAMED(run) {
    int64_t from;
    int64_t at, count;
};

/* Copies runs in the order of the row, `chunk` elements at a time: the next run overwrites the excess. */
static inline __attribute__((always_inline)) void NAMED(copy_runs)(const struct NAMED(run) * runs,
                                                                   int many, const REAL *from,
                                                                   REAL *to, const int chunk)
{
    for (int r = 0; r < many; r++)
        for (int64_t i = 0; i < runs[r].count; i += chunk)
            memcpy(to + runs[r].at + i, from + runs[r].from + i, (size_t)chunk * sizeof *to);
}

/* The rows of `columns` for some output pixels, `runs`, and taps k0 …. */
static inline __attribute__((always_inline)) void
NAMED(copy_taps)(const struct td__conv *conv, const struct td__gemm_part *part,
                 const struct NAMED(run) * runs, int many, const REAL *x, int64_t width, REAL *to,
                 const int chunk)
{
    const td_window *w = &conv->window;
    const int64_t stride = w->stride[1];
    int64_t kx = part->k0 % w->kernel[1], rest = part->k0 / w->kernel[1];
    int64_t ky = rest % w->kernel[0], channel = rest / w->kernel[0];
    for (int64_t k = 0; k < part->rows; k++, to += width) {
        const REAL *from = x +
                           (channel * conv->padded_height + ky * w->dilation[0]) *
                               conv->padded_width +
                           kx * w->dilation[1];
        if (chunk)
            NAMED(copy_runs)(runs, many, from, to, chunk);
        else
            for (int r = 0; r < many; r++)
                for (int64_t i = 0; i < runs[r].count; i++)
                    to[runs[r].at + i] = from[runs[r].from + i * stride];
        for (int64_t j = part->columns; j < width; j++)
            to[j] = 0;
        if (++kx < w->kernel[1])
            continue;
        kx = 0;
        if (++ky == w->kernel[0]) {
            ky = 0;
            channel++;
        }
    }
}

TD__VECTOR static void NAMED(columns_of_padded)(const struct td__conv *conv,
                                                const struct td__gemm_part *part, const REAL *x,
                                                int64_t width, REAL *to)
{
    const td_window *w = &conv->window;
    struct NAMED(run) runs[WIDEST];
    int many = 0;
    for (int64_t done = 0; done < part->columns; many++) {
        int64_t y = (part->n0 + done) / conv->out_width, at = (part->n0 + done) % conv->out_width;
        int64_t left = part->columns - done;
        runs[many].from = y * w->stride[0] * conv->padded_width + at * w->stride[1];
        runs[many].at = done;
        runs[many].count = conv->out_width - at < left ? conv->out_width - at : left;
        done += runs[many].count;
    }
    if (w->stride[1] != 1)
        NAMED(copy_taps)(conv, part, runs, many, x, width, to, 0);
    else if (conv->out_width <= 8)
        NAMED(copy_taps)(conv, part, runs, many, x, width, to, 8);
    else
        NAMED(copy_taps)(conv, part, runs, many, x, width, to, 16);
}

TD__VECTOR static void NAMED(rows_of_padded)(const struct td__conv *conv,
                                             const struct td__gemm_part *part, const REAL *x,
                                             int64_t width, REAL *to)
{
    const td_window *w = &conv->window;
    struct NAMED(run) runs[WIDEST];
    int many = 0;
    for (int64_t done = 0; done < part->columns; many++) {
        int64_t kx = (part->n0 + done) % w->kernel[1], rest = (part->n0 + done) / w->kernel[1];
        int64_t row = rest / w->kernel[0] * conv->padded_height +
                      rest % w->kernel[0] * w->dilation[0];
        int64_t left = part->columns - done;
        runs[many].from = row * conv->padded_width + kx * w->dilation[1];
        runs[many].at = done;
        runs[many].count = w->kernel[1] - kx < left ? w->kernel[1] - kx : left;
        if (w->dilation[1] != 1)
            runs[many].count = 1;
        done += runs[many].count;
    }
    int64_t ox = part->k0 % conv->out_width, oy = part->k0 / conv->out_width;
    for (int64_t p = 0; p < part->rows; p++, to += width) {
        const REAL *from = x + oy * w->stride[0] * conv->padded_width + ox * w->stride[1];
        if (w->kernel[1] == 1 || w->dilation[1] != 1)
            NAMED(copy_runs)(runs, many, from, to, 1);
        else if (w->kernel[1] <= 4)
            NAMED(copy_runs)(runs, many, from, to, 4);
        else
            NAMED(copy_runs)(runs, many, from, to, 8);
        for (int64_t j = part->columns; j < width; j++)
            to[j] = 0;
        if (++ox == conv->out_width) {
            ox = 0;
            oy++;
        }
    }
}

/* ---- From an image without padding ------------------------------------------------------------- */

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

/* The input under one kernel position, for `count` output pixels of a row from (oy, ox) on. */
static inline void NAMED(take)(const struct td__conv *conv, const REAL *image, int64_t position,
                               int64_t oy, int64_t ox, int64_t count, REAL *restrict to)
{
    const td_window *w = &conv->window;
    int64_t y = oy * w->stride[0] - w->padding[0] + position / w->kernel[1] * w->dilation[0];
    int64_t x = ox * w->stride[1] - w->padding[1] + position % w->kernel[1] * w->dilation[1];
    int64_t first = 0, end = 0;
    if (y >= 0 && y < conv->height)
        NAMED(inside)(x, w->stride[1], conv->width, count, &first, &end);
    for (int64_t i = 0; i < first; i++)
        to[i] = 0;
    for (int64_t i = first; i < end; i++)
        to[i] = image[y * conv->width + x + i * w->stride[1]];
    for (int64_t i = end; i < count; i++)
        to[i] = 0;
}

TD__VECTOR static void NAMED(columns_of_plain)(const struct td__conv *conv,
                                               const struct td__gemm_part *part, const REAL *x,
                                               int64_t width, REAL *packed)
{
    const int64_t kernel = conv->window.kernel[0] * conv->window.kernel[1];
    for (int64_t k = 0; k < part->rows; k++) {
        const int64_t channel = (part->k0 + k) / kernel, position = (part->k0 + k) % kernel;
        REAL *to = packed + k * width;
        for (int64_t done = 0, count; done < part->columns; done += count) {
            int64_t oy = (part->n0 + done) / conv->out_width;
            int64_t ox = (part->n0 + done) % conv->out_width;
            count = conv->out_width - ox < part->columns - done ? conv->out_width - ox
                                                                : part->columns - done;
            NAMED(take)
            (conv, x + channel * conv->height * conv->width, position, oy, ox, count, to + done);
        }
        for (int64_t j = part->columns; j < width; j++)
            to[j] = 0;
    }
}

TD__VECTOR static void NAMED(rows_of_plain)(const struct td__conv *conv,
                                            const struct td__gemm_part *part, const REAL *x,
                                            int64_t width, REAL *packed)
{
    const td_window *w = &conv->window;
    for (int64_t p = 0; p < part->rows; p++) {
        const int64_t pixel = part->k0 + p;
        const int64_t y0 = pixel / conv->out_width * w->stride[0] - w->padding[0];
        const int64_t x0 = pixel % conv->out_width * w->stride[1] - w->padding[1];
        REAL *to = packed + p * width;
        int64_t kx = part->n0 % w->kernel[1], rest = part->n0 / w->kernel[1];
        int64_t ky = rest % w->kernel[0], channel = rest / w->kernel[0];
        for (int64_t j = 0; j < part->columns; j++) {
            int64_t y = y0 + ky * w->dilation[0], at = x0 + kx * w->dilation[1];
            bool inside = y >= 0 && y < conv->height && at >= 0 && at < conv->width;
            to[j] = inside ? x[(channel * conv->height + y) * conv->width + at] : 0;
            if (++kx < w->kernel[1])
                continue;
            kx = 0;
            if (++ky == w->kernel[0]) {
                ky = 0;
                channel++;
            }
        }
        for (int64_t j = part->columns; j < width; j++)
            to[j] = 0;
    }
}

void NAMED(td__conv_columns)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                             int64_t width, void *packed)
{
    struct td__conv *conv = (struct td__conv *)gemm->b;
    const REAL *x = (const REAL *)conv->x + part->item * conv->x_image;
    if (conv->padded)
        NAMED(columns_of_padded)(conv, part, NAMED(padded)(conv, part->item), width, packed);
    else
        NAMED(columns_of_plain)(conv, part, x, width, packed);
}

void NAMED(td__conv_rows)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                          int64_t width, void *packed)
{
    struct td__conv *conv = (struct td__conv *)gemm->b;
    const REAL *x = (const REAL *)conv->x + part->item * conv->x_image;
    if (conv->padded)
        NAMED(rows_of_padded)(conv, part, NAMED(padded)(conv, part->item), width, packed);
    else
        NAMED(rows_of_plain)(conv, part, x, width, packed);
}

/* ---- col2im ------------------------------------------------------------------------------------ */

static inline void NAMED(add_row)(REAL *restrict to, const REAL *restrict from, int64_t count)
{
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++)
            to[i + j] += from[i + j];
    for (; i < count; i++)
        to[i] += from[i];
}

TD__VECTOR static void NAMED(add)(const struct td__conv *conv, const struct td__conv_piece *piece,
                                  const REAL *columns, REAL *x)
{
    const td_window *w = &conv->window;
    for (int64_t c = piece->c0; c < piece->c0 + piece->channels; c++)
        for (int64_t position = 0; position < w->kernel[0] * w->kernel[1]; position++) {
            const int64_t ky = position / w->kernel[1], kx = position % w->kernel[1];
            const int64_t at = kx * w->dilation[1] - w->padding[1];
            int64_t first, end;
            NAMED(inside)(at, w->stride[1], conv->width, conv->out_width, &first, &end);
            for (int64_t row = 0; row < piece->rows; row++, columns += conv->out_width) {
                int64_t y = (piece->y0 + row) * w->stride[0] - w->padding[0] + ky * w->dilation[0];
                if (y < 0 || y >= conv->height)
                    continue;
                REAL *restrict to = x + (c * conv->height + y) * conv->width + at;
                if (w->stride[1] == 1)
                    NAMED(add_row)(to + first, columns + first, end - first);
                else
                    for (int64_t i = first; i < end; i++)
                        to[i * w->stride[1]] += columns[i];
            }
        }
}

void NAMED(td__conv_add)(const struct td__conv *conv, const struct td__conv_piece *piece,
                         const REAL *columns, REAL *x)
{
    NAMED(add)(conv, piece, columns, x);
}

#undef REAL
#undef NAMED
