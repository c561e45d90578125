/* What goes wrong with offloaded shards: no room, devices that fail in the middle of a step, ranks that die. Each is one
 * sentence with the unit and the rank; parameters keep the values of the last step, and training goes on where it can. */
#include "offload_training.h"
#include "runner.h"
#include "toy_device.h"

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static td_device *toy(void)
{
    CHECK_OK(toy_register());
    toy_set_delay(10);
    return td_device_get("toy:0");
}

static int count_entries(const char *path)
{
    DIR *directory = opendir(path);
    CHECK(directory != NULL);
    int count = 0;
    for (struct dirent *entry; (entry = readdir(directory));)
        count += entry->d_name[0] != '.';
    closedir(directory);
    return count;
}

/* ---- Making a model ---------------------------------------------------------------------------------------------- */

static void check_refused(td_device *device, td_fsdp_offload tiers, td_status status,
                          const char *words)
{
    tiers.enabled = true;
    const td_fsdp_options options = {.min_parameters = 400, .offload = tiers};
    CHECK(!td_fsdp(offload_net(device), &options));
    CHECK_EQ(td_last_status(), status);
    CHECK_CONTAINS(td_last_error(), words);
    CHECK_CONTAINS(td_last_error(), "of the unit \"");
    char rank[30];
    snprintf(rank, sizeof rank, "on rank %d", td_get_rank(NULL));
    CHECK_CONTAINS(td_last_error(), rank);
}

RANKS(limits_and_directories, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    char path[300];
    snprintf(path, sizeof path, "%s/missing", td_test_temp_dir());
    for (int on_host = 0; on_host < 2; on_host++) {
        td_device *device = on_host ? td_device_get("cpu") : toy();
        check_refused(device, (td_fsdp_offload){.host_bytes = 5000}, TD_ERR_NOMEM,
                      "set offload.directory, or raise the limits");
        check_refused(device, (td_fsdp_offload){.host_bytes = 5000, .directory = path},
                      TD_ERR_SYSTEM, "No such file or directory");
        check_refused(device, (td_fsdp_offload){.host_bytes = 5000, .directory = td_test_program()},
                      TD_ERR_SYSTEM, "Not a directory");
    }
    CHECK_OK(td_destroy_process_group());
}

/* Without rights that root has anyway: /proc takes no files. */
RANKS(a_directory_that_takes_no_files, .ranks = 1)
{
    CHECK_OK(td_init_process_group(NULL));
    check_refused(td_device_get("cpu"), (td_fsdp_offload){.host_bytes = 1, .directory = "/proc"},
                  TD_ERR_SYSTEM, "no file can be made in the directory \"/proc\"");
    CHECK_OK(td_destroy_process_group());
}

/* Also those ranks fail that had room, and name the one that had none. */
RANKS(one_rank_without_a_directory, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    const td_fsdp_offload tiers = {
        .host_bytes = 1, .directory = td_get_rank(NULL) == 1 ? "/nowhere" : td_test_temp_dir()};
    if (td_get_rank(NULL) == 1) {
        check_refused(toy(), tiers, TD_ERR_SYSTEM, "No such file or directory");
    } else {
        td_fsdp_options options = {.min_parameters = 400, .offload = tiers};
        options.offload.enabled = true;
        CHECK(!td_fsdp(offload_net(toy()), &options));
        CHECK_EQ(td_last_status(), TD_ERR_SYSTEM);
        CHECK_CONTAINS(td_last_error(), "rank 1 could not make its shards");
    }
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 0);
    CHECK_OK(td_destroy_process_group());
}

RANKS(limits_that_differ, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    const td_fsdp_options options = {
        .min_parameters = 400,
        .offload = {.enabled = true, .device_bytes = td_get_rank(NULL) ? 100000 : 0}};
    CHECK(!td_fsdp(offload_net(toy()), &options));
    CHECK_EQ(td_last_status(), TD_ERR_MISMATCH);
    CHECK_CONTAINS(td_last_error(), "all ranks must pass the same td_fsdp_offload");
    CHECK_OK(td_destroy_process_group());
}

/* ---- A full disk ------------------------------------------------------------------------------------------------- */

/* Trains until there is no room: for shards, or for what the first step needs. */
static void fill_up(td_device *device, const char *directory, bool in_backward, const char *reason)
{
    const struct offload_job job = {.device = device, .parts = 1, .in_backward = in_backward};
    const td_fsdp_options options = {
        .min_parameters = 400,
        .offload = {.enabled = true, .host_bytes = 1, .directory = directory}};
    td_module *model = td_fsdp(offload_net(device), &options);
    if (!model)
        FAIL("the model: %s", td_last_error());
    td_optimizer *adam = offload_optimizer(model, &job);
    if (in_backward)
        CHECK_OK(td_optimizer_in_backward(model, adam));
    size_t bytes, bytes_after;
    void *before = offload_bits(model, adam, &bytes);
    float loss;
    td_status status = offload_step(model, adam, NULL, &job, 0, &loss, NULL);
    CHECK_EQ(status, TD_ERR_NOMEM);
    CHECK_CONTAINS(td_last_error(), reason);
    CHECK_CONTAINS(td_last_error(), directory);
    CHECK_CONTAINS(td_last_error(), "parameter");
    if (in_backward)
        CHECK_CONTAINS(td_last_error(), "on rank 0");
    if (!in_backward) {
        void *after = offload_bits(model, adam, &bytes_after);
        CHECK(bytes == bytes_after && !memcmp(before, after, bytes));
        free(after);
    }
    free(before);
    td_optimizer_destroy(adam);
    td_module_destroy(model);
}

struct full_disk {
    const char *directory;
    bool in_backward, on_host;
};

/* The model has 150 KB in f32: parameters and gradients fit, the state of the optimizer does not. */
static void fill_small_disk(void *arg)
{
    const struct full_disk *disk = arg;
    const char *size = disk->in_backward ? "size=300k" : "size=500k";
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("small", disk->directory, "tmpfs", 0, size))
        _exit(77);
    CHECK_OK(td_init_process_group(NULL));
    fill_up(disk->on_host ? td_device_get("cpu") : toy(), disk->directory, disk->in_backward,
            "No space left on device");
    CHECK_EQ(count_entries(disk->directory), 0);
    CHECK_OK(td_destroy_process_group());
    toy_reset(); /* a fork does not call what runs at exit */
}

static void fill_disk(bool in_backward, bool on_host)
{
    setenv("WORLD_SIZE", "1", 1);
    setenv("RANK", "0", 1);
    struct full_disk disk = {td_test_temp_dir(), in_backward, on_host};
    struct td_test_child child = td_test_fork(fill_small_disk, &disk);
    if (WIFEXITED(child.status) && WEXITSTATUS(child.status) == 77)
        td_test_skip("no file system can be mounted here");
    if (child.status)
        FAIL("%s", child.output);
    free(child.output);
}

RANKS(a_full_disk_in_a_step, .ranks = 1)
{
    fill_disk(false, false);
}

RANKS(a_full_disk_in_a_step_in_backward, .ranks = 1)
{
    fill_disk(true, false);
}

RANKS(a_full_disk_on_the_host, .ranks = 1)
{
    fill_disk(false, true);
}

RANKS(a_limit_of_file_sizes, .ranks = 1)
{
    CHECK_OK(td_init_process_group(NULL));
    struct rlimit limit;
    CHECK(!getrlimit(RLIMIT_FSIZE, &limit));
    limit.rlim_cur = 4096;
    td_device *device = td_device_get("cpu");
    td_module *net = offload_net(device);
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit)); /* SIGXFSZ would end this process */
    const td_fsdp_options options = {
        .min_parameters = 400,
        .offload = {.enabled = true, .host_bytes = 1, .directory = td_test_temp_dir()}};
    CHECK(!td_fsdp(net, &options));
    CHECK_EQ(td_last_status(), TD_ERR_NOMEM);
    CHECK_CONTAINS(td_last_error(), "File too large");
}

/* ---- Devices that fail ------------------------------------------------------------------------------------------- */

enum failure { ALLOC, KERNEL, KERNEL_LATER, COPY, COPY_LATER, FAILURES };

static void request(enum failure failure, int after)
{
    if (failure == ALLOC)
        toy_fail_alloc(0, after);
    else if (failure == KERNEL || failure == KERNEL_LATER)
        toy_fail_kernel(0, after, failure == KERNEL ? TOY_AT_LAUNCH : TOY_LATER);
    else
        toy_fail_copy(0, after, failure == COPY ? TOY_AT_LAUNCH : TOY_LATER);
}

/* All that a failed step leaves is taken by the next one. Without steps in backward, parameters are those of the step
 * before, and the next step has the bits that it would have had. */
static void fail_and_go_on(enum failure failure, int after, bool in_backward)
{
    td_device *device = toy();
    const struct offload_job job = {.device = device, .parts = 1, .in_backward = in_backward};
    const td_fsdp_options options = {.min_parameters = 400, .offload.enabled = true};
    td_module *model = td_fsdp(offload_net(device), &options);
    CHECK(model != NULL);
    td_optimizer *adam = offload_optimizer(model, &job);
    if (in_backward)
        CHECK_OK(td_optimizer_in_backward(model, adam));
    float loss;
    CHECK_OK(offload_step(model, adam, NULL, &job, 0, &loss, NULL));
    size_t bytes, bytes_after;
    void *before = offload_bits(model, adam, &bytes);
    request(failure, after);
    td_status status = offload_step(model, adam, NULL, &job, 1, &loss, NULL);
    if (failure == ALLOC)
        toy_fail_alloc(0, 0);
    else if (failure == KERNEL || failure == KERNEL_LATER)
        toy_fail_kernel(0, 0, TOY_LATER);
    else
        toy_fail_copy(0, 0, TOY_LATER);
    if (status) {
        char *reason = strdup(td_last_error());
        CHECK(reason && reason[0]);
        toy_clear_failure(0);
        if (!in_backward) {
            CHECK_OK(td_fsdp_gather_begin(model, false)); /* a failed pass may leave them whole */
            CHECK_OK(td_fsdp_gather_end(model));
            void *after_bits = offload_bits(model, adam, &bytes_after);
            if (bytes != bytes_after || memcmp(before, after_bits, bytes))
                FAIL("failure %d of call %d: the failed step has changed something: %s",
                     (int)failure, after, reason);
            free(after_bits);
        }
        free(reason);
    }
    free(before);
    td_status again =
        TD_ERR_STATE; /* what the device noticed late may be reported by the next step */
    for (int i = 0; i < 3 && again; i++)
        again = offload_step(model, adam, NULL, &job, 2, &loss, NULL);
    CHECK_OK(again);
    if (loss != loss)
        FAIL("failure %d of call %d, steps in backward: %d: the loss is lost", (int)failure, after,
             in_backward);
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    td_memory_stats stats;
    CHECK_OK(td_device_memory_stats(device, &stats));
    if (stats.allocated >= 8192)
        FAIL("failure %d of call %d, steps in backward: %d: memory is left:\n%s", (int)failure,
             after, in_backward, (const char *)td_device_memory_text(device).data);
}

RANKS(devices_that_fail, .ranks = 1, .deadline_s = 120)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int failure = 0; failure < FAILURES; failure++)
        for (int after = 1; after < 40; after += 4)
            for (int in_backward = 0; in_backward < 2; in_backward++)
                fail_and_go_on(failure, after, in_backward);
    CHECK_OK(td_destroy_process_group());
}

enum { HOGS = 200 };

/* Memory that runs out in a pass, and is there again. */
RANKS(memory_of_a_gather, .ranks = 1)
{
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(toy_register());
    toy_set_memory(2 << 20);
    td_device *device = toy();
    const struct offload_job job = {.device = device, .parts = 1};
    const td_fsdp_options options = {.min_parameters = 400, .offload.enabled = true};
    td_module *model = td_fsdp(offload_net(device), &options);
    CHECK(model != NULL);
    td_optimizer *adam = offload_optimizer(model, &job);
    float loss;
    CHECK_OK(td_device_empty_cache(device));
    td_tensor *hogs[HOGS];
    int count = 0;
    while (count < HOGS && (hogs[count] = td_empty(TD_SHAPE(4096), TD_F32, device)))
        count++;
    CHECK(count > 1 && count < HOGS);
    td_tensor_release(hogs[--count]); /* for the input */
    CHECK_EQ(offload_step(model, adam, NULL, &job, 0, &loss, NULL), TD_ERR_NOMEM);
    CHECK_CONTAINS(td_last_error(), "of the unit \"");
    CHECK_CONTAINS(td_last_error(), "whose first parameter is \"");
    CHECK_CONTAINS(td_last_error(), "on rank 0");
    while (count)
        td_tensor_release(hogs[--count]);
    CHECK_OK(offload_step(model, adam, NULL, &job, 0, &loss, NULL));
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Ranks that die ------------------------------------------------------------------------------------------------ */

static void outlive(bool in_backward)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *device = toy();
    const struct offload_job job = {.device = device, .parts = 1, .in_backward = in_backward};
    const td_fsdp_options options = {
        .min_parameters = 400,
        .offload = {.enabled = true, .host_bytes = 60000, .directory = td_test_temp_dir()}};
    td_module *model = td_fsdp(offload_net(device), &options);
    CHECK(model != NULL);
    td_optimizer *adam = offload_optimizer(model, &job);
    if (in_backward)
        CHECK_OK(td_optimizer_in_backward(model, adam));
    float loss;
    CHECK_OK(offload_step(model, adam, NULL, &job, 0, &loss, NULL));
    if (td_get_rank(NULL) == 1) {
        td_forward(model,
                   td_tensor_to(td_ones(TD_SHAPE(6, 24), TD_F32, td_device_get("cpu")), device));
        raise(SIGKILL);
    }
    td_status status = offload_step(model, adam, NULL, &job, 1, &loss, NULL);
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "rank 1");
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 0);
}

RANKS(a_rank_that_dies, .ranks = 2, .may_die = 2)
{
    outlive(false);
}

RANKS(a_rank_that_dies_with_steps_in_backward, .ranks = 2, .may_die = 2)
{
    outlive(true);
}
