/* The gradient of a convolution's weights by direct products; see conv.h.
 *
 *     grad_w [taps, O] += x [taps, pixels] grad_y^T [pixels, O]     image by image
 *
 * x is read from frames (conv_frame.h); grad_y is packed. Partial sums have at most CHUNK pixels, and are added
 * in order.
 *
 * The images are divided into parts, each with its own gradient, and these are added in order at the end. The
 * number of parts depends on the sizes alone. If the weights are too large for that, there is one part, and the
 * threads share its gradient: some images at a time are prepared, then jobs with some taps and channels each
 * process them in order. */
#include "base/fail.h"
#include "tensor/aligned.h"
#include "tensor/conv.h"
#include "tensor/conv_frame.h"
#include "tensor/direct.h"
#include "tensor/parallel_for.h"

#include <stdatomic.h>
#include <stdlib.h>

enum {
    CHUNK = 1024,             /* pixels */
    READY_BYTES = 512 * 1024, /* of images that are prepared, for each thread */
    MOST_TAPS = 56,           /* of a job */
    FEW_TAPS = 14,
    JOBS_EACH = 4, /* for each thread, where there is enough to do */

    MOST_PARTS = 16,
    PART_PIXELS = 1024,              /* of a part, at least */
    PART_ELEMENTS = 4 * 1024 * 1024, /* of the gradients of all parts, at most */
};

struct weight_plan {
    const struct td__conv *conv;
    td_dtype dtype;
    const struct td__direct_loops *loops;
    const void *x, *grad_y;
    void *grad_w;

    struct td__conv_frame frame;
    bool in_place;    /* images are their own frames */
    int64_t *rows;    /* [taps] */
    int64_t *steps;   /* [pixels] */
    int64_t job_taps; /* of a job */
    int64_t tap_jobs, strip_jobs;

    int64_t parts;
    struct td__aligned sums; /* [parts, weights], or none: grad_w itself */
    atomic_int *failed;

    /* Of one part, which works with a copy of the plan. */
    int64_t first, ready; /* images that are prepared */
    int64_t frame_size, packed_size;
    struct td__aligned frames; /* [ready, groups, frame_size] */
    struct td__aligned packed; /* [ready, groups, packed_size] */
};

static void *after(td_dtype dtype, const void *data, int64_t count)
{
    return (char *)data + count * (int64_t)td_dtype_size(dtype);
}

static const void *image_of(const struct weight_plan *plan, int64_t image, int64_t group)
{
    const struct td__conv *conv = plan->conv;
    return after(plan->dtype, plan->x,
                 image * conv->x_image + group * conv->channels * conv->height * conv->width);
}

/* ---- Preparing images ----------------------------------------------------------------------- */

static void prepare(void *arg, int64_t begin, int64_t end)
{
    const struct weight_plan *plan = arg;
    const struct td__conv *conv = plan->conv;
    for (int64_t i = begin; i < end; i++) {
        const int64_t image = plan->first + i / conv->groups, group = i % conv->groups;
        if (!plan->in_place)
            td__conv_frame_fill(&plan->frame, -conv->window.padding[0], plan->frame.rows,
                                td_dtype_size(plan->dtype), image_of(plan, image, group),
                                after(plan->dtype, plan->frames.data, i * plan->frame_size));
        plan->loops->pack(
            after(plan->dtype, plan->grad_y,
                  image * conv->out_image + group * conv->out_channels * conv->pixels),
            conv->pixels, conv->pixels, conv->out_channels,
            after(plan->dtype, plan->packed.data, i * plan->packed_size));
    }
}

/* ---- Jobs ------------------------------------------------------------------------------------- */

static void run_job(const struct weight_plan *plan, int64_t job)
{
    const struct td__conv *conv = plan->conv;
    const int64_t first = job % plan->tap_jobs * plan->job_taps, rest = job / plan->tap_jobs;
    const int64_t strip = rest % plan->strip_jobs, group = rest / plan->strip_jobs;
    const int64_t o = strip * plan->loops->strip;
    const int64_t chunks = (conv->pixels + CHUNK - 1) / CHUNK;
    const int64_t most = (conv->pixels + chunks - 1) / chunks;
    struct td__direct direct = {
        .m = conv->taps - first < plan->job_taps ? conv->taps - first : plan->job_taps,
        .n = conv->out_channels - o < plan->loops->strip ? conv->out_channels - o
                                                         : plan->loops->strip,
        .rows = plan->rows + first,
        .c = after(plan->dtype, plan->grad_w,
                   (group * conv->out_channels + o) * conv->taps + first),
        .c_column = conv->taps,
        .add = true,
    };
    for (int64_t i = 0; i < plan->ready; i++) {
        const int64_t item = i * conv->groups + group;
        direct.a = plan->in_place ? image_of(plan, plan->first + i, group)
                                  : after(plan->dtype, plan->frames.data, item * plan->frame_size);
        for (int64_t p = 0; p < conv->pixels; p += most) {
            direct.k = conv->pixels - p < most ? conv->pixels - p : most;
            direct.period = direct.end = direct.k;
            direct.steps = plan->steps + p;
            direct.b = after(plan->dtype, plan->packed.data,
                             item * plan->packed_size + o * conv->pixels + p * plan->loops->strip);
            plan->loops->run(&direct);
        }
    }
}

static void run_jobs(void *arg, int64_t begin, int64_t end)
{
    for (int64_t job = begin; job < end; job++)
        run_job(arg, job);
}

/* ---- The plan --------------------------------------------------------------------------------- */

/* Parts of grad_w that are large enough, but enough of them for all threads. */
static void choose_jobs(struct weight_plan *plan)
{
    const struct td__conv *conv = plan->conv;
    const int threads = td_get_num_threads();
    const int64_t wanted = threads > 1 ? (int64_t)threads * JOBS_EACH : 1;
    plan->strip_jobs = (conv->out_channels + plan->loops->strip - 1) / plan->loops->strip;
    plan->job_taps = MOST_TAPS;
    while (plan->job_taps > FEW_TAPS &&
           (conv->taps + plan->job_taps - 1) / plan->job_taps * plan->strip_jobs * conv->groups <
               wanted)
        plan->job_taps -= FEW_TAPS;
    plan->tap_jobs = (conv->taps + plan->job_taps - 1) / plan->job_taps;
}

static void fill_tables(struct weight_plan *plan)
{
    const struct td__conv *conv = plan->conv;
    const td_window *window = &conv->window;
    const int64_t columns = plan->frame.columns;
    for (int64_t i = 0; i < conv->taps; i++) {
        const int64_t kx = i % window->kernel[1], rest = i / window->kernel[1];
        const int64_t ky = rest % window->kernel[0], channel = rest / window->kernel[0];
        plan->rows[i] = channel * plan->frame.plane + ky * window->dilation[0] * columns +
                        kx * window->dilation[1];
    }
    for (int64_t i = 0; i < conv->pixels; i++)
        plan->steps[i] = i / conv->out_width * window->stride[0] * columns +
                         i % conv->out_width * window->stride[1];
}

/* Images `begin` to `end` - 1, added to plan->grad_w. */
static bool run_part(struct weight_plan *plan, int64_t begin, int64_t end)
{
    const struct td__conv *conv = plan->conv;
    const int64_t size = (int64_t)td_dtype_size(plan->dtype);
    const int64_t bytes = conv->groups * (plan->frame_size + plan->packed_size) * size;
    int64_t most = (int64_t)READY_BYTES * (plan->parts > 1 ? 1 : td_get_num_threads()) / bytes;
    if (most > end - begin)
        most = end - begin;
    if (most < 1)
        most = 1;
    const int64_t items = most * conv->groups;
    plan->frames = td__aligned_alloc((size_t)(items * plan->frame_size * size));
    plan->packed = td__aligned_alloc((size_t)(items * plan->packed_size * size));
    const bool ok = plan->frames.data && plan->packed.data;
    for (int64_t i = 0; i < items && ok && !plan->in_place; i++)
        td__conv_frame_clear(&plan->frame, (size_t)size,
                             after(plan->dtype, plan->frames.data, i * plan->frame_size));
    for (int64_t i = begin; i < end && ok; i += most) {
        plan->first = i;
        plan->ready = end - i < most ? end - i : most;
        td__parallel_for(plan->ready * conv->groups, 1, prepare, plan);
        td__parallel_for(plan->tap_jobs * plan->strip_jobs * conv->groups, 1, run_jobs, plan);
    }
    td__aligned_free(&plan->frames);
    td__aligned_free(&plan->packed);
    return ok;
}

static int64_t weights_of(const struct td__conv *conv)
{
    return conv->groups * conv->out_channels * conv->taps;
}

static void run_parts(void *arg, int64_t begin, int64_t end)
{
    const struct weight_plan *plan = arg;
    const int64_t images = plan->conv->images;
    for (int64_t i = begin; i < end; i++) {
        struct weight_plan part = *plan;
        if (plan->sums.data)
            part.grad_w = after(plan->dtype, plan->sums.data, i * weights_of(plan->conv));
        if (!run_part(&part, images * i / plan->parts, images * (i + 1) / plan->parts))
            *plan->failed = 1;
    }
}

/* Weights `begin` to `end` - 1 of all parts. */
static void add_parts(void *arg, int64_t begin, int64_t end)
{
    const struct weight_plan *plan = arg;
    for (int64_t i = 0; i < plan->parts; i++) {
        const void *part = after(plan->dtype, plan->sums.data, i * weights_of(plan->conv));
        for (int64_t j = begin; j < end; j++) {
            if (plan->dtype == TD_F32)
                ((float *)plan->grad_w)[j] += ((const float *)part)[j];
            else
                ((double *)plan->grad_w)[j] += ((const double *)part)[j];
        }
    }
}

static td_status run_plan(struct weight_plan *plan)
{
    const struct td__conv *conv = plan->conv;
    const int64_t weights = weights_of(conv);
    plan->parts = conv->images * conv->pixels / PART_PIXELS;
    if (plan->parts > conv->images)
        plan->parts = conv->images;
    if (plan->parts > MOST_PARTS)
        plan->parts = MOST_PARTS;
    if (plan->parts < 2 || plan->parts * weights > PART_ELEMENTS)
        plan->parts = 1;
    if (plan->parts > 1) {
        const size_t bytes = (size_t)(plan->parts * weights) * td_dtype_size(plan->dtype);
        plan->sums = td__aligned_alloc(bytes);
        if (!plan->sums.data)
            return td__fail_nomem("conv2d");
        memset(plan->sums.data, 0, bytes);
    }
    td__parallel_for(plan->parts, 1, run_parts, plan);
    if (plan->sums.data)
        td__parallel_for(weights, TD__GRAIN, add_parts, plan);
    td__aligned_free(&plan->sums);
    return *plan->failed ? td__fail_nomem("conv2d") : TD_OK;
}

td_status td__conv_direct_grad_weight(const struct td__conv *conv, td_dtype dtype,
                                      const void *grad_y, const void *x, void *grad_w)
{
    const td_window *window = &conv->window;
    atomic_int failed = 0;
    struct weight_plan plan = {
        .failed = &failed,
        .conv = conv,
        .dtype = dtype,
        .loops = td__direct_loops(dtype),
        .x = x,
        .grad_y = grad_y,
        .grad_w = grad_w,
        .frame = {.channels = conv->channels,
                  .height = conv->height,
                  .width = conv->width,
                  .left = -window->padding[1],
                  .rows = conv->padded_height,
                  .columns = conv->padded_width},
        .in_place = window->padding[0] == 0 && window->padding[1] == 0,
    };
    td__conv_frame_space(&plan.frame);
    if (plan.in_place)
        plan.frame.plane = conv->height * conv->width;
    plan.frame_size = plan.in_place ? 0 : td__conv_frame_size(&plan.frame);
    plan.packed_size = plan.loops->packed_size(conv->pixels, conv->out_channels);
    choose_jobs(&plan);
    plan.rows = malloc((size_t)conv->taps * sizeof *plan.rows);
    plan.steps = malloc((size_t)conv->pixels * sizeof *plan.steps);
    td_status status = plan.rows && plan.steps ? TD_OK : td__fail_nomem("conv2d");
    if (status == TD_OK) {
        fill_tables(&plan);
        status = run_plan(&plan);
    }
    free(plan.rows);
    free(plan.steps);
    return status;
}
