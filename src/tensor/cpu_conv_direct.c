/* The output of a convolution, and the gradient of its input, by direct products; see conv.h.
 *
 * Both use the same kind of plan. A result is divided into units of rows: one row of the output, or as many
 * rows of the gradient as the stride. A job is some units of one group of one image: it copies the part of
 * the source that they depend on with its padding (conv_frame.h), which also keeps it in L2, and one product
 * computes all their pixels.
 *
 * The pixels of a gradient have phases: with a stride of 2, pixels in even and in odd rows and columns meet
 * different kernel positions. Each phase is a product with the weights of its positions.
 *
 * Jobs write no shared memory, and a pixel's sum does not depend on the job that computes it. */
#include "base/fail.h"
#include "tensor/aligned.h"
#include "tensor/conv.h"
#include "tensor/conv_frame.h"
#include "tensor/direct.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"

#include <stdatomic.h>
#include <stdlib.h>

enum {
    FRAME_BYTES = 256 * 1024,
    JOBS_EACH = 8, /* for each thread, where there is enough to do */
    FEW_PIXELS = 112,
    FULL_ROW = 12, /* pixels that are worth a tile */
};

bool td__conv_fits_direct(int64_t channels, int64_t steps)
{
    int64_t vectors = (channels + 15) / 16;
    return channels * 4 >= vectors * 16 * 3 && steps >= 48;
}

/* The pixels of a result that meet the same kernel positions. */
struct phase {
    int64_t row, column; /* of the first one, within a unit */
    int64_t width;       /* pixels in a row */
    int64_t k;           /* steps of the product */
    int64_t *steps;      /* [k] */
    int64_t positions;   /* steps of a channel */
    int64_t
        *position_rows; /* [positions] rows of the source, from the first one of a unit's frame */
    int64_t *rows;      /* [pixels of a job] */
    int64_t b_group;    /* elements of B of a group */
    struct td__aligned b;
};

struct plan {
    td_dtype dtype;
    const struct td__direct_loops *loops;
    int64_t images, groups;

    const void *source;
    int64_t source_image;
    struct td__conv_frame frame; /* for `most` units */
    int64_t top;                 /* of the first unit's frame */
    int64_t unit_rows;           /* of the source, from one unit's frame to the next */
    bool in_place;               /* the source is its own frame */

    void *result;
    int64_t channels, height, width, result_image;
    int64_t unit_height, unit_width; /* pixels of the result in a unit: as many phases */
    int64_t units, most;             /* in all, in a job */
    int64_t jobs_each;               /* jobs of a group of an image */

    struct phase *phases;
    int phase_count;
    void *bias; /* [groups, channels], with room after it; or NULL */
    atomic_int failed;
};

/* A thread's workspace: a frame, and the phases of one row of each unit, each as a separate result. */
struct workspace {
    struct td__aligned frame;
    struct td__aligned phases; /* [unit_width, phase_size] */
    int64_t phase_size;        /* [channels, phase_column] */
    int64_t phase_column;      /* room for [units, width of the phase] */
};

static void *after(td_dtype dtype, const void *data, int64_t count)
{
    return (char *)data + count * (int64_t)td_dtype_size(dtype);
}

/* ---- Jobs ------------------------------------------------------------------------------------- */

/* The kernel positions that meet the source in unit `unit`, from *begin to *end - 1. The others meet the zeros
 * above and below it and are skipped, unless the rows are too short to fill a tile: with finite weights they add
 * 0. */
static void find_positions(const struct plan *plan, const struct phase *phase, int64_t unit,
                           int64_t *begin, int64_t *end)
{
    const int64_t top = plan->top + unit * plan->unit_rows, *rows = phase->position_rows;
    *begin = 0;
    *end = phase->positions;
    if (phase->width < FULL_ROW)
        return;
    while (*begin < *end && (top + rows[*begin] < 0 || top + rows[*begin] >= plan->frame.height))
        ++*begin;
    while (*begin < *end &&
           (top + rows[*end - 1] < 0 || top + rows[*end - 1] >= plan->frame.height))
        --*end;
}

/* Units `first` to `first + units - 1`, the columns of the result `column` elements apart. Those that meet
 * the same positions are one product. */
static void run_phase(const struct plan *plan, const struct phase *phase, const void *source,
                      int64_t group, int64_t first, int64_t units, int64_t column, void *result)
{
    struct td__direct direct = {
        .n = plan->channels,
        .k = phase->k,
        .a = source,
        .steps = phase->steps,
        .b = after(plan->dtype, phase->b.data, group * phase->b_group),
        .bias = plan->bias ? after(plan->dtype, plan->bias, group * plan->channels) : NULL,
        .c_column = column,
    };
    for (int64_t unit = 0, next; unit < units && phase->width > 0; unit = next) {
        int64_t begin, end, next_begin, next_end;
        find_positions(plan, phase, first + unit, &begin, &end);
        for (next = unit + 1; next < units; next++) {
            find_positions(plan, phase, first + next, &next_begin, &next_end);
            if (next_begin != begin || next_end != end)
                break;
        }
        /* Where nothing is left out, all steps are one run: short runs take longer. */
        const bool all = begin == 0 && end == phase->positions;
        direct.period = all ? phase->k : phase->positions;
        direct.begin = begin;
        direct.end = all ? phase->k : end;
        direct.m = (next - unit) * phase->width;
        direct.rows = phase->rows + unit * phase->width;
        direct.c = after(plan->dtype, result, unit * phase->width);
        plan->loops->run(&direct);
    }
}

/* Every `step`-th of `count` elements of a row. */
TD__VECTOR static void spread_f32(const float *restrict from, int64_t count, int64_t step,
                                  float *restrict to)
{
    for (int64_t i = 0; i < count; i++)
        to[i * step] = from[i];
}

TD__VECTOR static void spread_f64(const double *restrict from, int64_t count, int64_t step,
                                  double *restrict to)
{
    for (int64_t i = 0; i < count; i++)
        to[i * step] = from[i];
}

/* Rows with a stride of 2, the common case, `step` elements apart. There may be one more even element. */
TD__VECTOR static void zip_f32(const float *restrict even, int64_t evens, const float *restrict odd,
                               int64_t odds, int64_t rows, int64_t step, float *restrict to)
{
    for (int64_t y = 0; y < rows; y++, even += evens, odd += odds, to += step) {
        for (int64_t i = 0; i < odds; i++) {
            to[2 * i] = even[i];
            to[2 * i + 1] = odd[i];
        }
        if (odds < evens)
            to[2 * odds] = even[odds];
    }
}

/* A row of each unit of channel `channel`, out of the rows of its phases. `to` is that of the first unit. */
static void join_rows(const struct plan *plan, const struct workspace *work, int64_t channel,
                      int64_t units, void *to)
{
    const int64_t step = plan->unit_height * plan->width;
    const void *first = after(plan->dtype, work->phases.data, channel * work->phase_column);
    if (plan->unit_width == 2 && plan->dtype == TD_F32) {
        zip_f32(first, plan->phases[0].width, (const float *)first + work->phase_size,
                plan->phases[1].width, units, step, to);
        return;
    }
    for (int64_t i = 0; i < plan->unit_width; i++)
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t width = plan->phases[i].width;
            const void *row = after(plan->dtype, first, i * work->phase_size + unit * width);
            void *result = after(plan->dtype, to, unit * step + i);
            if (plan->dtype == TD_F32)
                spread_f32(row, width, plan->unit_width, result);
            else
                spread_f64(row, width, plan->unit_width, result);
        }
}

/* Row `row` of each unit: its phases one after the other, which are then joined. */
static void run_phases(const struct plan *plan, int64_t row, const void *source, int64_t group,
                       int64_t first, int64_t units, const struct workspace *work, void *result)
{
    const size_t row_bytes = (size_t)plan->width * td_dtype_size(plan->dtype);
    int64_t steps = 0;
    for (int64_t i = 0; i < plan->unit_width; i++)
        steps += plan->phases[row * plan->unit_width + i].k;
    for (int64_t i = 0; i < plan->unit_width && steps > 0; i++)
        run_phase(plan, &plan->phases[row * plan->unit_width + i], source, group, first, units,
                  work->phase_column, after(plan->dtype, work->phases.data, i * work->phase_size));
    for (int64_t channel = 0; channel < plan->channels; channel++) {
        void *to = after(plan->dtype, result, (channel * plan->height + row) * plan->width);
        if (steps > 0)
            join_rows(plan, work, channel, units, to);
        for (int64_t unit = 0; unit < units && steps == 0;
             unit++) /* the kernel does not meet them */
            memset(after(plan->dtype, to, unit * plan->unit_height * plan->width), 0, row_bytes);
    }
}

static void run_job(const struct plan *plan, int64_t job, const struct workspace *work)
{
    const int64_t block = job % plan->jobs_each, item = job / plan->jobs_each;
    const int64_t group = item % plan->groups, image = item / plan->groups;
    const int64_t unit = block * plan->most;
    const int64_t units = plan->units - unit < plan->most ? plan->units - unit : plan->most;

    const void *source = after(plan->dtype, plan->source,
                               image * plan->source_image + group * plan->frame.channels *
                                                                plan->frame.height *
                                                                plan->frame.width);
    const int64_t top = plan->top + unit * plan->unit_rows;
    if (plan->in_place) {
        source = after(plan->dtype, source, top * plan->frame.width + plan->frame.left);
    } else {
        const int64_t used = plan->frame.rows - (plan->most - units) * plan->unit_rows;
        td__conv_frame_fill(&plan->frame, top, used, td_dtype_size(plan->dtype), source,
                            work->frame.data);
        source = work->frame.data;
    }
    const int64_t y = unit * plan->unit_height;
    void *result = after(plan->dtype, plan->result,
                         image * plan->result_image +
                             (group * plan->channels * plan->height + y) * plan->width);
    if (plan->phase_count == 1) {
        run_phase(plan, plan->phases, source, group, unit, units, plan->height * plan->width,
                  result);
        return;
    }
    for (int64_t row = 0; row < plan->unit_height; row++) {
        /* The last unit may be cut off before this row. */
        int64_t rows = (plan->height - y - row + plan->unit_height - 1) / plan->unit_height;
        run_phases(plan, row, source, group, unit, rows < units ? rows : units, work, result);
    }
}

static bool open_workplace(const struct plan *plan, struct workspace *work)
{
    const size_t size = td_dtype_size(plan->dtype);
    *work = (struct workspace){0};
    if (!plan->in_place) {
        const size_t bytes = (size_t)td__conv_frame_size(&plan->frame) * size;
        work->frame = td__aligned_alloc(bytes);
        if (!work->frame.data)
            return false;
        td__conv_frame_clear(&plan->frame, size, work->frame.data);
    }
    if (plan->phase_count > 1) {
        work->phase_column = plan->most * plan->phases[0].width; /* the widest phase */
        work->phase_size = plan->channels * work->phase_column;
        work->phases = td__aligned_alloc((size_t)(plan->unit_width * work->phase_size) * size);
        if (!work->phases.data)
            return false;
    }
    return true;
}

static void run_jobs(void *arg, int64_t begin, int64_t end)
{
    struct plan *plan = arg;
    struct workspace work;
    if (open_workplace(plan, &work)) {
        for (int64_t job = begin; job < end; job++)
            run_job(plan, job, &work);
    } else {
        plan->failed = 1;
    }
    td__aligned_free(&work.frame);
    td__aligned_free(&work.phases);
}

static td_status run_plan(struct plan *plan)
{
    td__parallel_for(plan->images * plan->groups * plan->jobs_each, 1, run_jobs, plan);
    return plan->failed ? td__fail_nomem("conv2d") : TD_OK;
}

/* ---- Plans ------------------------------------------------------------------------------------ */

/* Chooses the units of a job: as many as keep the frame in L2, fewer if there would not be enough jobs for all
 * threads. `frame.rows` is that of one unit and becomes that of all. */
static void choose_units(struct plan *plan)
{
    const int64_t size = (int64_t)td_dtype_size(plan->dtype);
    const int64_t row = plan->frame.channels * plan->frame.columns * size;
    const int64_t pixels = plan->unit_height * plan->width;
    int64_t most = (FRAME_BYTES / row - plan->frame.rows) / plan->unit_rows + 1;
    const int threads = td_get_num_threads();
    const int64_t jobs = threads > 1 ? (int64_t)threads * JOBS_EACH : 1;
    const int64_t share = plan->units * plan->images * plan->groups / jobs;
    if (most > share)
        most = share;
    if (most * pixels < FEW_PIXELS)
        most = (FEW_PIXELS + pixels - 1) / pixels;
    if (most > plan->units)
        most = plan->units;
    plan->jobs_each = (plan->units + most - 1) / most;
    plan->most = (plan->units + plan->jobs_each - 1) / plan->jobs_each;
    plan->frame.rows += (plan->most - 1) * plan->unit_rows;
}

/* Frames that lie inside the images need no copy. */
static void settle_frame(struct plan *plan)
{
    const int64_t reach = plan->top + (plan->units - plan->most) * plan->unit_rows +
                          plan->frame.rows;
    plan->in_place = plan->top >= 0 && reach <= plan->frame.height && plan->frame.left >= 0 &&
                     plan->frame.left + plan->frame.columns <= plan->frame.width;
    if (plan->in_place) {
        plan->frame.columns = plan->frame.width;
        plan->frame.plane = plan->frame.height * plan->frame.width;
    } else {
        td__conv_frame_space(&plan->frame);
    }
}

static void free_plan(struct plan *plan)
{
    for (int i = 0; i < plan->phase_count; i++) {
        free(plan->phases[i].steps);
        free(plan->phases[i].rows);
        free(plan->phases[i].position_rows);
        td__aligned_free(&plan->phases[i].b);
    }
    free(plan->phases);
    free(plan->bias);
}

static td_status make_phases(struct plan *plan, int64_t count)
{
    plan->phases = calloc((size_t)count, sizeof *plan->phases);
    if (!plan->phases)
        return td__fail_nomem("conv2d");
    plan->phase_count = (int)count;
    return TD_OK;
}

/* The tables of a phase and memory for its weights, for `positions` steps of each channel. Its pixels are
 * `down` and `right` elements of the frame apart. */
static td_status make_tables(struct plan *plan, struct phase *phase, int64_t positions,
                             int64_t down, int64_t right)
{
    const int64_t pixels = plan->most * phase->width, k = plan->frame.channels * positions;
    phase->k = k;
    phase->positions = positions;
    phase->position_rows = calloc((size_t)(positions > 0 ? positions : 1),
                                  sizeof *phase->position_rows);
    phase->b_group = plan->loops->packed_size(k, plan->channels);
    phase->steps = malloc((size_t)(k > 0 ? k : 1) * sizeof *phase->steps);
    phase->rows = malloc((size_t)(pixels > 0 ? pixels : 1) * sizeof *phase->rows);
    const size_t bytes = (size_t)(plan->groups * phase->b_group) * td_dtype_size(plan->dtype);
    phase->b = td__aligned_alloc(bytes);
    if (!phase->steps || !phase->rows || !phase->position_rows || !phase->b.data)
        return td__fail_nomem("conv2d");
    if (plan->channels % plan->loops->strip) /* otherwise packing overwrites everything */
        memset(phase->b.data, 0, bytes);
    for (int64_t i = 0; i < pixels; i++)
        phase->rows[i] = i / phase->width * down + i % phase->width * right;
    return TD_OK;
}

/* ---- Forward ---------------------------------------------------------------------------------- */

/* Copies the bias, with padding for vector loads. */
static td_status copy_bias(struct plan *plan, const void *bias)
{
    const size_t size = td_dtype_size(plan->dtype);
    const size_t count = (size_t)(plan->groups * plan->channels);
    plan->bias = calloc(count + (size_t)plan->loops->strip, size);
    if (!plan->bias)
        return td__fail_nomem("conv2d");
    memcpy(plan->bias, bias, count * size);
    return TD_OK;
}

static td_status plan_forward(struct plan *plan, const struct td__conv *conv, const void *w)
{
    const td_window *window = &conv->window;
    TD_TRY(make_phases(plan, 1));
    struct phase *phase = &plan->phases[0];
    phase->width = conv->out_width;
    TD_TRY(make_tables(plan, phase, window->kernel[0] * window->kernel[1],
                       window->stride[0] * plan->frame.columns, window->stride[1]));
    for (int64_t k = 0; k < conv->taps; k++) {
        const int64_t kx = k % window->kernel[1], rest = k / window->kernel[1];
        const int64_t ky = rest % window->kernel[0], channel = rest / window->kernel[0];
        phase->steps[k] = channel * plan->frame.plane +
                          ky * window->dilation[0] * plan->frame.columns + kx * window->dilation[1];
        phase->position_rows[k % phase->positions] = ky * window->dilation[0];
    }
    for (int64_t g = 0; g < conv->groups; g++)
        plan->loops->pack(after(plan->dtype, w, g * conv->out_channels * conv->taps), conv->taps,
                          conv->taps, conv->out_channels,
                          after(plan->dtype, phase->b.data, g * phase->b_group));
    return TD_OK;
}

td_status td__conv_direct(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                          const void *bias, void *out)
{
    const td_window *window = &conv->window;
    struct plan plan = {
        .dtype = dtype,
        .loops = td__direct_loops(dtype),
        .images = conv->images,
        .groups = conv->groups,
        .source = x,
        .source_image = conv->x_image,
        .frame = {.channels = conv->channels,
                  .height = conv->height,
                  .width = conv->width,
                  .left = -window->padding[1],
                  .rows = (window->kernel[0] - 1) * window->dilation[0] + 1,
                  .columns = (conv->out_width - 1) * window->stride[1] +
                             (window->kernel[1] - 1) * window->dilation[1] + 1},
        .top = -window->padding[0],
        .unit_rows = window->stride[0],
        .result = out,
        .channels = conv->out_channels,
        .height = conv->out_height,
        .width = conv->out_width,
        .result_image = conv->out_image,
        .unit_height = 1,
        .unit_width = 1,
        .units = conv->out_height,
    };
    choose_units(&plan);
    settle_frame(&plan);
    td_status status = bias ? copy_bias(&plan, bias) : TD_OK;
    if (status == TD_OK)
        status = plan_forward(&plan, conv, w);
    if (status == TD_OK)
        status = run_plan(&plan);
    free_plan(&plan);
    return status;
}

/* ---- The gradient of the input ---------------------------------------------------------------- */

/* The output pixel that row (or column) `at` of a unit meets through a kernel position: one for each unit,
 * *first in unit 0, or none. */
static bool meets(const td_window *window, int dim, int64_t at, int64_t position,
                  int64_t *first)
{
    const int64_t distance = at + window->padding[dim] - position * window->dilation[dim];
    *first = distance / window->stride[dim];
    return distance % window->stride[dim] == 0;
}

/* The least and the greatest of those, for all rows of a unit and all positions. */
static void bounds(const td_window *window, int dim, int64_t *least, int64_t *greatest)
{
    *least = INT64_MAX;
    *greatest = INT64_MIN;
    for (int64_t at = 0; at < window->stride[dim]; at++)
        for (int64_t position = 0; position < window->kernel[dim]; position++) {
            int64_t first;
            if (!meets(window, dim, at, position, &first))
                continue;
            *least = first < *least ? first : *least;
            *greatest = first > *greatest ? first : *greatest;
        }
}

/* The weights of one step, [channels] that are `kernel` elements apart, into the strips of B. */
#define PACK_STEP(T)                                                                               \
    do {                                                                                           \
        const T *from = w;                                                                         \
        T *to = (T *)b + step * strip;                                                             \
        for (int64_t c = 0; c < plan->channels; c += strip, to += strip * k) {                     \
            const int64_t left = plan->channels - c, count = left < strip ? left : strip;          \
            for (int64_t i = 0; i < count; i++, from += kernel)                                    \
                to[i] = *from;                                                                     \
        }                                                                                          \
    } while (0)

static void pack_step(const struct plan *plan, const void *w, int64_t kernel, int64_t k,
                      int64_t step, void *b)
{
    const int64_t strip = plan->loops->strip;
    if (plan->dtype == TD_F32)
        PACK_STEP(float);
    else
        PACK_STEP(double);
}

static td_status plan_phase(struct plan *plan, const struct td__conv *conv, const void *w,
                            struct phase *phase, const int64_t least[2])
{
    const td_window *window = &conv->window;
    const int64_t kernel = window->kernel[0] * window->kernel[1];
    int64_t offsets[2], positions = 0;
    for (int64_t i = 0; i < kernel; i++)
        positions += meets(window, 0, phase->row, i / window->kernel[1], &offsets[0]) &&
                     meets(window, 1, phase->column, i % window->kernel[1], &offsets[1]);
    const int64_t k = conv->out_channels * positions;
    phase->width = (conv->width - phase->column + window->stride[1] - 1) / window->stride[1];
    TD_TRY(make_tables(plan, phase, positions, plan->frame.columns, 1));
    int64_t step = 0;
    for (int64_t o = 0; o < conv->out_channels; o++)
        for (int64_t i = 0; i < kernel; i++) {
            if (!meets(window, 0, phase->row, i / window->kernel[1], &offsets[0]) ||
                !meets(window, 1, phase->column, i % window->kernel[1], &offsets[1]))
                continue;
            phase->steps[step] = o * plan->frame.plane +
                                 (offsets[0] - least[0]) * plan->frame.columns + offsets[1] -
                                 least[1];
            phase->position_rows[step % positions] = offsets[0] - least[0];
            for (int64_t g = 0; g < conv->groups; g++)
                pack_step(plan,
                          after(plan->dtype, w, (g * conv->out_channels + o) * conv->taps + i),
                          kernel, k, step, after(plan->dtype, phase->b.data, g * phase->b_group));
            step++;
        }
    return TD_OK;
}

static td_status plan_grad_input(struct plan *plan, const struct td__conv *conv, const void *w,
                                 const int64_t least[2])
{
    const td_window *window = &conv->window;
    TD_TRY(make_phases(plan, window->stride[0] * window->stride[1]));
    for (int i = 0; i < plan->phase_count; i++) {
        plan->phases[i].row = i / window->stride[1];
        plan->phases[i].column = i % window->stride[1];
        TD_TRY(plan_phase(plan, conv, w, &plan->phases[i], least));
    }
    return TD_OK;
}

td_status td__conv_direct_grad_input(const struct td__conv *conv, td_dtype dtype,
                                     const void *grad_y, const void *w, void *grad_x)
{
    const td_window *window = &conv->window;
    int64_t least[2], greatest[2];
    for (int d = 0; d < 2; d++)
        bounds(window, d, &least[d], &greatest[d]);
    struct plan plan = {
        .dtype = dtype,
        .loops = td__direct_loops(dtype),
        .images = conv->images,
        .groups = conv->groups,
        .source = grad_y,
        .source_image = conv->out_image,
        .frame = {.channels = conv->out_channels,
                  .height = conv->out_height,
                  .width = conv->out_width,
                  .left = least[1],
                  .rows = greatest[0] - least[0] + 1,
                  .columns = (conv->width - 1) / window->stride[1] + greatest[1] - least[1] + 1},
        .top = least[0],
        .unit_rows = 1,
        .result = grad_x,
        .channels = conv->channels,
        .height = conv->height,
        .width = conv->width,
        .result_image = conv->x_image,
        .unit_height = window->stride[0],
        .unit_width = window->stride[1],
        .units = (conv->height + window->stride[0] - 1) / window->stride[0],
    };
    choose_units(&plan);
    settle_frame(&plan);
    td_status status = plan_grad_input(&plan, conv, w, least);
    if (status == TD_OK)
        status = run_plan(&plan);
    free_plan(&plan);
    return status;
}
