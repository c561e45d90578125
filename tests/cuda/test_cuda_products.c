/* Matrix products of the CUDA plug-in on the emulated device with a fake cuBLASLt: which algorithm is chosen, where it is kept,
 * and that results are right whatever is chosen. Each job is a process of its own, since a process chooses once. */
#include "forks.h"
#include "runner.h"

#include <tandem/tandem.h>

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct job {
    int64_t m, n, k;
    td_dtype dtype;
    const char *variables[6]; /* "NAME=value", for this process */
    bool twice;               /* the product is computed twice */
};

static const char *path_in_temp(const char *name)
{
    static char paths[2][512];
    static int turn;
    char *path = paths[turn ^= 1];
    snprintf(path, sizeof paths[0], "%s/%s", td_test_temp_dir(), name);
    return path;
}

/* The greatest difference to the host's product, relative to the greatest element. */
static double error_of(td_tensor *a, td_tensor *b, td_tensor *out)
{
    td_device *host = td_device_get("cpu");
    td_tensor *expected = td_matmul(td_to_dtype(a, TD_F64), td_to_dtype(b, TD_F64));
    td_tensor *difference = td_abs(td_sub(td_to_dtype(td_tensor_to(out, host), TD_F64), expected));
    return td_item(td_max(difference)) / td_item(td_max(td_abs(expected)));
}

static void compute(void *arg)
{
    const struct job *job = arg;
    TD_SCOPE;
    for (int i = 0; job->variables[i]; i++)
        putenv((char *)job->variables[i]);
    td_device *device = td_device_get("cuda:0"), *host = td_device_get("cpu");
    CHECK(device);
    td_manual_seed(1);
    td_tensor *a = td_randn(TD_SHAPE(job->m, job->k), job->dtype, host);
    td_tensor *b = td_randn(TD_SHAPE(job->k, job->n), job->dtype, host);
    td_tensor *x = td_tensor_to(a, device), *y = td_tensor_to(b, device);
    for (int i = 0; i <= job->twice; i++) {
        td_tensor *out = td_matmul(x, y);
        CHECK(out);
        CHECK(error_of(a, b, out) < (td_dtype_size(job->dtype) == 2 ? 1e-2 : 1e-5));
    }
}

/* Runs a job with an empty log, and the choices that former jobs of this test have stored. */
static void run_function(void (*fn)(void *), struct job job)
{
    unlink(path_in_temp("log"));
    setenv("FAKE_LT_LOG", path_in_temp("log"), 1);
    setenv("TANDEM_CACHE_DIR", path_in_temp("cache"), 1);
    setenv("TANDEM_CUDA_TUNE", "1000000", 1); /* the emulated device is slow */
    struct td_test_child child = td_test_fork(fn, &job);
    if (!WIFEXITED(child.status) || WEXITSTATUS(child.status))
        fputs(child.output, stderr);
    CHECK(WIFEXITED(child.status) && !WEXITSTATUS(child.status));
    free(child.output);
}

static void run(struct job job)
{
    run_function(compute, job);
}

/* How many lines of the log begin with `text`. */
static int logged(const char *text)
{
    char line[256];
    int count = 0;
    FILE *file = fopen(path_in_temp("log"), "r");
    while (file && fgets(line, sizeof line, file))
        count += !strncmp(line, text, strlen(text));
    if (file)
        fclose(file);
    return count;
}

static int files_kept(void)
{
    DIR *directory = opendir(path_in_temp("cache"));
    int count = 0;
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        count += entry->d_name[0] != '.';
    if (directory)
        closedir(directory);
    return count;
}

static const struct job large = {256, 256, 256, TD_F32, {"FAKE_LT_FASTEST=4"}, true};

TEST(the_fastest_is_chosen_and_kept)
{
    run(large);
    CHECK(logged("run 0 ") > 2 && logged("run 2 ") > 2); /* tried */
    CHECK_EQ(logged("run 1 "), 0);                       /* adds in place */
    CHECK_EQ(logged("run 3 ") > 2, 1);                   /* with a workspace */
    CHECK(logged("run 4 ") > 6);
    CHECK_EQ(logged("propose"), 1);
    CHECK_EQ(files_kept(), 1);
    struct job other = large;
    other.variables[0] = "FAKE_LT_FASTEST=2"; /* not measured again */
    run(other);
    CHECK_EQ(logged("run 4 "), 2);
    CHECK_EQ(logged("run "), 2);
    CHECK_EQ(logged("propose"), 0);
    other.k = 300; /* another shape */
    run(other);
    CHECK(logged("run 2 ") > 6);
    CHECK_EQ(files_kept(), 1);
    other = large;
    other.variables[1] = "FAKE_LT_VERSION=140000"; /* another library */
    run(other);
    CHECK_EQ(logged("propose"), 1);
    CHECK_EQ(files_kept(), 2);
}

TEST(a_choice_that_the_library_refuses_is_measured_again)
{
    run(large);
    struct job other = large;
    other.variables[1] = "FAKE_LT_FAIL=check:1";
    run(other);
    CHECK_EQ(logged("propose"), 1);
    CHECK(logged("run 4 ") > 2);
}

TEST(measuring_ends_when_its_time_is_spent)
{
    struct job other = large;
    other.variables[1] = "TANDEM_CUDA_TUNE=0.001";
    run(other);
    CHECK(logged("run 0 ") > 6);
    CHECK_EQ(logged("run 4 "), 0);
}

TEST(small_products_are_not_measured)
{
    struct job small = large;
    small.m = 255;
    run(small);
    CHECK_EQ(logged("run 0 "), 2);
    CHECK_EQ(logged("run "), 2);
    CHECK_EQ(files_kept(), 0);
}

TEST(measuring_can_be_turned_off)
{
    struct job other = large;
    other.variables[1] = "TANDEM_CUDA_TUNE=0";
    run(other);
    CHECK_EQ(logged("run 0 "), 2);
    CHECK_EQ(logged("run "), 2);
    CHECK_EQ(files_kept(), 0);
    run(large);
    run(other); /* what was chosen before counts */
    CHECK_EQ(logged("run 4 "), 2);
}

TEST(nothing_is_measured_while_a_graph_is_captured)
{
    struct job other = large;
    other.variables[1] = "EMULATED_CUDA_CAPTURING=1";
    run(other);
    CHECK_EQ(logged("run 0 "), 2);
    CHECK_EQ(logged("run "), 2);
}

TEST(nothing_is_kept_where_that_is_asked_for)
{
    struct job other = large;
    other.variables[1] = "TANDEM_CACHE_DIR=none";
    run(other);
    CHECK(logged("run 4 ") > 6);
    CHECK_EQ(files_kept(), 0);
}

TEST(candidates_that_fail_are_not_chosen)
{
    struct job other = large;
    other.variables[1] = "EMULATED_CUDA_FAIL=cuEventSynchronize:1"; /* nothing can be timed */
    run(other);
    CHECK_EQ(logged("propose"), 1);
    CHECK(logged("run 0 ") >= 2);
}

/* Two backward passes: the second one adds to the gradient of the first. */
static void add_gradients(void *arg)
{
    const struct job *job = arg;
    TD_SCOPE;
    td_device *device = td_device_get("cuda:0"), *host = td_device_get("cpu");
    putenv((char *)job->variables[0]);
    td_tensor *a = td_randn(TD_SHAPE(job->m, job->k), TD_F32, host), *x = td_tensor_to(a, device);
    td_tensor *w = td_zeros(TD_SHAPE(job->n, job->k), TD_F32, device);
    td_tensor *c = td_randn(TD_SHAPE(job->m, job->n), TD_F32, host);
    td_tensor_set_requires_grad(w, true);
    for (int i = 0; i < 2; i++)
        CHECK(!td_backward(td_sum(td_mul(td_f_linear(x, w, NULL), td_tensor_to(c, device)))));
    td_tensor *twice = td_mul_scalar(td_transpose(c, 0, 1), 2);
    CHECK(error_of(twice, a, td_tensor_grad(w)) < 1e-5);
}

TEST(measuring_does_not_touch_what_is_added_to)
{
    run_function(add_gradients, large);
    CHECK_EQ(logged("propose"), 3); /* forward, the gradient, and the one that is added */
    CHECK(logged("run 4 ") > 15);
}

/* The MLP of a transformer in bf16, [m, 32] -> [m, n] -> [m, k], against that of the host in f32. */
static void compute_mlp(void *arg)
{
    const struct job *job = arg;
    TD_SCOPE;
    td_device *device = td_device_get("cuda:0"), *host = td_device_get("cpu");
    td_module *module = td_sequential(td_linear(32, job->n), td_gelu_tanh(),
                                      td_linear(job->n, job->k), NULL);
    td_tensor *x = td_randn(TD_SHAPE(job->m, 32), TD_F32, host);
    td_tensor *expected = td_forward(module, x);
    CHECK(!td_backward(td_sum(td_square(expected))));
    td_tensor *bias = td_clone(td_tensor_grad(td_param(td_child(module, 0), 1)));
    td_tensor_set_grad(td_param(td_child(module, 0), 1), NULL);
    CHECK(!td_module_to(module, device));
    TD_AUTOCAST("cuda", &(td_autocast_options){.dtype = TD_BF16});
    td_tensor *y = td_forward(module, td_tensor_to(x, device));
    CHECK(!td_backward(td_sum(td_square(td_to_dtype(y, TD_F32)))));
    CHECK(td_allclose(td_to_dtype(td_tensor_to(y, host), TD_F32), expected, 3e-2, 3e-2));
    td_tensor *grad = td_tensor_grad(td_param(td_child(module, 0), 1));
    CHECK(td_allclose(td_tensor_to(grad, host), bias, 5e-2, 5e-2));
    td_module_destroy(module);
}

/* Sums that need more bits than bf16 has; added to in the second pass. */
static void compute_wide_gradient(void *arg)
{
    (void)arg;
    TD_SCOPE;
    td_device *device = td_device_get("cuda:0"), *host = td_device_get("cpu");
    td_tensor *x = td_ones(TD_SHAPE(257, 16), TD_F32, device);
    td_tensor *w = td_zeros(TD_SHAPE(8, 16), TD_F32, device);
    td_tensor_set_requires_grad(w, true);
    for (int pass = 1; pass <= 2; pass++) {
        TD_AUTOCAST("cuda", &(td_autocast_options){.dtype = TD_BF16});
        CHECK(!td_backward(td_sum(td_to_dtype(td_f_linear(x, w, NULL), TD_F32))));
        td_tensor *expected = td_full(TD_SHAPE(8, 16), 257 * pass, TD_F32, host);
        CHECK(td_equal(td_tensor_to(td_tensor_grad(w), host), expected));
    }
}

TEST(gradients_of_weights_are_not_rounded_under_autocast)
{
    run_function(compute_wide_gradient, large);
}

static int epilogues(const struct job *job, int which)
{
    char pattern[64];
    int count = 0;
    for (int algorithm = 0; algorithm < 5; algorithm++) {
        snprintf(pattern, sizeof pattern, "run %d %d %d %d %d\n", algorithm, (int)job->m,
                 (int)job->n, which == 164 ? 32 : (int)job->k, which);
        count += logged(pattern);
    }
    return count;
}

TEST(the_gelu_of_an_mlp_is_computed_with_its_products, .deadline_s = 100)
{
    static const struct job small = {.m = 24, .n = 64, .k = 16};
    run_function(compute_mlp, small);
    CHECK_EQ(epilogues(&small, 164), 1); /* GELU_AUX_BIAS */
    CHECK_EQ(epilogues(&small, 208),
             0); /* DGELU_BGRAD: small ones are not measured, and composed */

    /* The ways to compute the gradient of a large one are measured; the next process knows the fastest. */
    static const struct job other = {.m = 256, .n = 512, .k = 128};
    run_function(compute_mlp, other);
    CHECK(epilogues(&other, 192) > 5 && epilogues(&other, 208) > 5);
    run_function(compute_mlp, other);
    CHECK(epilogues(&other, 192) + epilogues(&other, 208) <= 1);
}

/* Logits of an odd number of classes, and the gradients of both operands. */
static void compute_unaligned(void *arg)
{
    const struct job *job = arg;
    TD_SCOPE;
    for (int i = 0; job->variables[i]; i++)
        putenv((char *)job->variables[i]);
    td_device *device = td_device_get("cuda:0"), *host = td_device_get("cpu");
    td_tensor *a = td_randn(TD_SHAPE(job->m, job->k), TD_BF16, host);
    td_tensor *b = td_randn(TD_SHAPE(job->n, job->k), TD_BF16, host);
    td_tensor *bias = td_randn(TD_SHAPE(job->n), TD_BF16, host);
    td_tensor *c = td_randn(TD_SHAPE(job->m, job->n), TD_BF16, host);
    td_tensor *x = td_tensor_to(a, device), *w = td_tensor_to(b, device);
    td_tensor_set_requires_grad(x, true);
    td_tensor_set_requires_grad(w, true);
    for (int i = 0; i <= job->twice; i++) {
        td_tensor *y = td_f_linear(x, w, td_tensor_to(bias, device));
        CHECK(error_of(a, td_transpose(b, 0, 1), td_sub(y, td_tensor_to(bias, device))) < 2e-2);
        CHECK(!td_backward(td_sum(td_mul(y, td_tensor_to(c, device)))));
    }
    td_tensor *factor = td_mul_scalar(c, job->twice ? 2 : 1);
    CHECK(error_of(factor, b, td_tensor_grad(x)) < 2e-2);
    CHECK(error_of(td_transpose(factor, 0, 1), a, td_tensor_grad(w)) < 2e-2);
}

TEST(large_unaligned_products_are_padded, .deadline_s = 100)
{
    struct job job = {512, 1025, 520, TD_BF16, {"TANDEM_CUDA_TUNE=0"}, true};
    run_function(compute_unaligned, job);
    CHECK_EQ(logged("run 0 512 1032 520 4"), 2);
    CHECK_EQ(logged("run 0 512 520 1032 1"), 2);
    CHECK_EQ(logged("run 0 1032 520 512 1"), 2);
    CHECK_EQ(logged("run "), 6);
    job.variables[1] = "TANDEM_CUDA_COPIES_MIB=0";
    run_function(compute_unaligned, job);
    CHECK_EQ(logged("run 0 512 1025 520 4"), 2);
    CHECK_EQ(logged("run "), 6);
    job.variables[1] = "TANDEM_CUDA_COPIES_MIB=1"; /* too little for the copy of the weight */
    run_function(compute_unaligned, job);
    CHECK_EQ(logged("run 0 512 1025 520 4"), 2);
    job = (struct job){4096, 129, 520, TD_BF16, {"TANDEM_CUDA_TUNE=0", "TANDEM_CUDA_COPIES_MIB=1"},
                       true};
    run_function(compute_unaligned, job);
    CHECK_EQ(logged("run 0 3840 136 520 4"), 2); /* in two pieces */
    CHECK_EQ(logged("run 0 256 136 520 4"), 2);
}

static void compute_at_once(int rank, void *arg)
{
    (void)rank;
    compute(arg);
}

TEST(one_of_several_processes_measures)
{
    struct job job = large;
    setenv("FAKE_LT_LOG", path_in_temp("log"), 1);
    setenv("TANDEM_CACHE_DIR", path_in_temp("cache"), 1);
    setenv("TANDEM_CUDA_TUNE", "1000000", 1); /* the emulated device is slow */
    fork_ranks(3, compute_at_once, &job);
    CHECK_EQ(logged("propose"), 1);
    CHECK_EQ(files_kept(), 1);
}

/* Several tiles and steps, of which the last ones are not full. */
TEST(small_products_are_computed_without_the_library)
{
    struct job job = {70, 45, 200, TD_F32, {"TANDEM_CUDA_SMALL_PRODUCTS=2097152"}, false};
    for (td_dtype dtype = TD_F32; dtype <= TD_BF16; dtype++) {
        job.dtype = dtype;
        run(job);
        CHECK_EQ(logged("run "), 0);
    }
    run_function(add_gradients, job);
    CHECK_EQ(logged("run "), 0);
    job.k = 257; /* more than are summed in one go */
    run(job);
    CHECK_EQ(logged("run "), 1);
    job = (struct job){128, 128, 128, TD_F32, {"TANDEM_CUDA_SMALL_PRODUCTS=2097152"}, false};
    run(job); /* at the bound */
    CHECK_EQ(logged("run "), 1);
}
