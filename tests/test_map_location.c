/* Files and batches on their way to accelerators: map_location, loading in pieces, modules and training on their devices,
 * and pin_memory. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *path(void)
{
    static char text[512];
    snprintf(text, sizeof text, "%s/a.safetensors", td_test_temp_dir());
    return text;
}

static void add(td_state *state, const char *name, double value, const char *device)
{
    td_tensor *tensor = td_full(TD_SHAPE(5), value, TD_F32, td_device_get(device));
    CHECK_OK(td_state_add(state, name, tensor));
    td_tensor_release(tensor);
}

/* Two tensors of toy:0, one of toy:1 and one of the host. */
static void save_four(void)
{
    CHECK_OK(toy_register());
    td_state *state = td_state_create();
    add(state, "a", 1, "toy:0");
    add(state, "b", 2, "toy:0");
    add(state, "c", 3, "toy:1");
    add(state, "d", 4, "cpu");
    CHECK_OK(td_save_safetensors(path(), state, NULL, 0));
    td_state_destroy(state);
}

/* Loads the file, and compares elements and devices. */
static void check_devices(const td_map_location *map, const char *const devices[4])
{
    td_state *state = td_load_safetensors(path(), map);
    if (!state)
        FAIL("%s", td_last_error());
    for (int i = 0; i < 4; i++) {
        TD_SCOPE;
        td_tensor *tensor = td_state_tensor(state, i);
        CHECK_STR(td_device_name(td_tensor_device(tensor)), devices[i]);
        CHECK(td_item(td_sum(tensor)) == 5 * (i + 1));
    }
    td_state_destroy(state);
}

static void find_devices(const char *key, const char *value, void *arg)
{
    if (!strcmp(key, "tandem.devices"))
        snprintf(arg, 64, "%s", value);
}

static td_device *choose(const char *name, const char *saved, void *arg)
{
    CHECK_STR(arg, "arg");
    if (!strcmp(name, "d"))
        return NULL;
    return td_device_get(!strcmp(saved, "toy:0") ? "toy:1" : "toy:0");
}

TEST(tensors_go_where_map_location_says)
{
    save_four();
    char note[64] = "";
    CHECK_OK(td_read_safetensors_notes(path(), find_devices, note));
    CHECK_STR(note, "toy:0*2 toy:1*1 cpu*1");
    td_device *toy1 = td_device_get("toy:1");
    const char *const host[] = {"cpu", "cpu", "cpu", "cpu"};
    const char *const first[] = {"toy:1", "toy:1", "toy:1", "toy:1"};
    check_devices(NULL, host);
    check_devices(&(td_map_location){0}, host);
    check_devices(&(td_map_location){.device = toy1}, first);
    check_devices(&(td_map_location){.as_saved = true},
                  (const char *const[]){"toy:0", "toy:0", "toy:1", "cpu"});
    td_device_mapping one = {"toy:0", td_device_get("cpu:2")};
    check_devices(&(td_map_location){.mappings = &one, .count = 1},
                  (const char *const[]){"cpu:2", "cpu:2", "toy:1", "cpu"});
    check_devices(&(td_map_location){.choose = choose, .arg = "arg"},
                  (const char *const[]){"toy:1", "toy:1", "toy:0", "cpu"});
    TD_DEVICE_SCOPE(toy1);
    check_devices(NULL, first);
}

/* toy:1 becomes toy:7 in the file; the checksum is looked at after the devices. */
static void rename_device(const char *file_path)
{
    FILE *file = fopen(file_path, "r+b");
    CHECK(file != NULL);
    char text[8192] = "";
    size_t size = fread(text, 1, sizeof text, file);
    bool found = false;
    for (size_t i = 0; i + 6 < size; i++)
        if (!memcmp(text + i, "toy:1*", 6)) {
            CHECK(!fseek(file, (long)i + 4, SEEK_SET) && fputc('7', file) == '7');
            found = true;
        }
    CHECK(found);
    fclose(file);
}

TEST(a_device_that_is_not_there_is_named)
{
    save_four();
    rename_device(path());
    CHECK(!td_load_safetensors(path(), &(td_map_location){.as_saved = true}));
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), "\"c\" was saved on toy:7, which is not there; map_location");
    CHECK(!td_load_safetensors(path(), &(td_map_location){.device = td_device_get("toy:9")}));
    CHECK_CONTAINS(td_last_error(), "toy:9");
    td_map_location both = {.device = td_device_get("cpu"), .as_saved = true};
    CHECK(!td_load_safetensors(path(), &both));
    CHECK_CONTAINS(td_last_error(), "more than one");
}

TEST(large_tensors_stream_through_a_few_pieces)
{
    enum { MANY = 2000003 }; /* 8 MB: no multiple of a piece */
    CHECK_OK(toy_register());
    td_device *toy = td_device_get("toy:0");
    float *numbers = malloc(MANY * sizeof *numbers);
    for (int i = 0; i < MANY; i++)
        numbers[i] = (float)(i % 9973);
    td_state *state = td_state_create();
    td_tensor *x = td_from_array(numbers, TD_SHAPE(MANY), TD_F32, toy);
    CHECK_OK(td_state_add(state, "x", x));
    CHECK_OK(td_save_safetensors(path(), state, NULL, 0));
    td_state *back = td_load_safetensors(path(), &(td_map_location){.device = toy});
    CHECK(back != NULL);
    CHECK(toy_pinned_bytes() <= 4 << 20);
    td_tensor *host = td_tensor_to(td_state_get(back, "x"), td_device_get("cpu"));
    CHECK_MEM(td_tensor_data(host), numbers, MANY * sizeof *numbers);
    td_tensor_release(host);
    td_state_destroy(back);
    td_state_destroy(state);
    td_tensor_release(x);
    free(numbers);
}

TEST(a_failed_copy_is_reported)
{
    save_four();
    toy_fail_copy(1, 1, TOY_LATER);
    CHECK(!td_load_safetensors(path(), &(td_map_location){.device = td_device_get("toy:1")}));
    CHECK_CONTAINS(td_last_error(), "toy:1");
    toy_clear_failure(1);
}

/* ---- Modules -------------------------------------------------------------------------------------------- */

enum { WIDE = 256, LAYERS = 4, LAYER_BYTES = WIDE * WIDE * 4 };

static td_module *make_wide(uint64_t seed, td_device *device)
{
    td_manual_seed(seed);
    td_module *net = td_sequential(td_linear(WIDE, WIDE), td_linear(WIDE, WIDE),
                                   td_linear(WIDE, WIDE), td_linear(WIDE, WIDE), NULL);
    CHECK_OK(td_module_to(net, device));
    return net;
}

static void check_same(td_module *a, td_module *b)
{
    td_state *x = td_module_state(a), *y = td_module_state(b);
    CHECK_EQ(td_state_count(x), td_state_count(y));
    for (int i = 0; i < td_state_count(x); i++) {
        TD_SCOPE;
        td_tensor *u = td_tensor_to(td_state_tensor(x, i), td_device_get("cpu"));
        td_tensor *v = td_tensor_to(td_state_tensor(y, i), td_device_get("cpu"));
        CHECK_MEM(td_tensor_data(u), td_tensor_data(v), td_tensor_nbytes(u));
    }
    td_state_destroy(x);
    td_state_destroy(y);
}

/* Loads the file into another module on toy:0; the most memory of toy:0 beyond the module's. */
static int64_t load_on_toy(td_module *saved, const td_map_location *map)
{
    td_device *toy = td_device_get("toy:0");
    td_module *net = make_wide(9, toy);
    td_memory_stats before, after;
    CHECK_OK(td_device_synchronize(toy));
    CHECK_OK(td_device_reset_peak(toy));
    CHECK_OK(td_device_memory_stats(toy, &before));
    CHECK_OK(td_load_module(path(), net, map));
    CHECK_OK(td_device_memory_stats(toy, &after));
    CHECK(td_tensor_device(td_module_parameter(net, "0.weight")) == toy);
    check_same(saved, net);
    td_module_destroy(net);
    return after.allocated_peak - before.allocated;
}

TEST(a_module_stays_on_its_device)
{
    CHECK_OK(toy_register());
    td_module *saved = make_wide(1, td_device_get("toy:1"));
    CHECK_OK(td_save_module(path(), saved));
    CHECK(load_on_toy(saved, NULL) >= LAYERS * LAYER_BYTES);
    td_device *cpu = td_device_get("cpu");
    CHECK(load_on_toy(saved, &(td_map_location){.device = cpu}) < 2 * LAYER_BYTES);
    CHECK(load_on_toy(saved, &(td_map_location){.as_saved = true}) < 2 * LAYER_BYTES); /* toy:1 */

    /* A module over two devices, and one in a wrapper. */
    td_module *net = make_wide(5, td_device_get("toy:0"));
    CHECK_OK(td_module_to(td_module_find(net, "2"), td_device_get("toy:1")));
    CHECK_OK(td_load_module(path(), net, NULL));
    CHECK_STR(td_device_name(td_tensor_device(td_module_parameter(net, "2.weight"))), "toy:1");
    check_same(saved, net);
    td_module *wrapped = td_data_parallel(make_wide(6, td_device_get("toy:0")), NULL);
    td_memory_stats before, after;
    CHECK_OK(td_device_reset_peak(td_device_get("toy:0")));
    CHECK_OK(td_device_memory_stats(td_device_get("toy:0"), &before));
    CHECK_OK(td_load_module(path(), wrapped, NULL));
    CHECK_OK(td_device_memory_stats(td_device_get("toy:0"), &after));
    CHECK(after.allocated_peak - before.allocated >= LAYERS * LAYER_BYTES);
    check_same(saved, td_module_find(wrapped, "module"));
    td_module_destroy(wrapped);
    td_module_destroy(net);
    td_module_destroy(saved);
}

TEST(a_module_of_a_device_that_is_not_there)
{
    CHECK_OK(toy_register());
    td_module *saved = make_wide(1, td_device_get("toy:1")), *net = make_wide(2, NULL),
              *same = td_module_clone(net);
    CHECK_OK(td_save_module(path(), saved));
    rename_device(path());
    CHECK_FAILS(td_load_module(path(), net, &(td_map_location){.as_saved = true}), TD_ERR_INVALID,
                "\"0.weight\" was saved on toy:7, which is not there; map_location can send it to "
                "another device");
    CHECK_FAILS(td_load_module(path(), net, NULL), TD_ERR_INVALID, "damaged"); /* the checksum */
    toy_fail_copy(0, 3, TOY_LATER);
    CHECK_OK(td_save_module(path(), saved));
    td_map_location there = {.device = td_device_get("toy:0")};
    CHECK_FAILS(td_load_module(path(), net, &there), TD_ERR_SYSTEM, "toy:0");
    toy_clear_failure(0);
    check_same(net, same);
    CHECK_OK(td_load_module(path(), net, NULL));
    check_same(net, saved);
    td_module_destroy(saved);
    td_module_destroy(net);
    td_module_destroy(same);
}

/* ---- Training ------------------------------------------------------------------------------------------- */

struct run {
    td_module *net;
    td_optimizer *adam;
    td_training training;
};

static struct run begin_run(uint64_t seed, td_device *device)
{
    struct run run = {.net = make_wide(seed, device)};
    run.adam = td_adam(run.net, NULL);
    run.training = (td_training){.model = run.net, .optimizer = run.adam};
    return run;
}

static void step(struct run *run, int seed)
{
    TD_SCOPE;
    td_device *device = td_tensor_device(td_module_parameter(run->net, "0.weight"));
    td_manual_seed((uint64_t)seed);
    td_tensor *x = td_tensor_to(td_randn(TD_SHAPE(3, WIDE), TD_F32, td_device_get("cpu")), device);
    CHECK_OK(td_optimizer_zero_grad(run->adam));
    CHECK_OK(td_backward(td_mean(td_square(td_forward(run->net, x)))));
    CHECK_OK(td_optimizer_step(run->adam));
    run->training.step++;
}

static void end_run(struct run *run)
{
    td_optimizer_destroy(run->adam);
    td_module_destroy(run->net);
}

/* Resumes on another device, from a file of toy:1, and goes on with the same bits; the map is for all ranks. */
static void check_resumes(const td_map_location *map, td_device *device)
{
    struct run first = begin_run(1, td_device_get("toy:1"));
    step(&first, 1);
    CHECK_OK(td_training_save(path(), &first.training, NULL));
    struct run second = begin_run(7, device);
    second.training.map_location = map;
    CHECK_OK(td_training_load(path(), &second.training, NULL));
    CHECK_EQ(second.training.step, 1);
    step(&first, 2);
    step(&second, 2);
    check_same(first.net, second.net);
    td_state *state = td_optimizer_state(second.adam);
    CHECK(td_tensor_device(td_state_get(state, "state.0.exp_avg")) == device);
    td_state_destroy(state);
    end_run(&first);
    end_run(&second);
}

TEST(training_goes_on_on_another_device)
{
    CHECK_OK(toy_register());
    td_device *cpu = td_device_get("cpu"), *toy = td_device_get("toy:0");
    check_resumes(NULL, toy);
    check_resumes(NULL, cpu);
    check_resumes(&(td_map_location){.device = cpu}, toy);
    check_resumes(&(td_map_location){.as_saved = true}, toy);
}

/* Ranks on devices of their own, and with maps of their own. */
RANKS(training_of_several_ranks_goes_on_on_other_devices, .ranks = 3, .deadline_s = 60)
{
    CHECK_OK(toy_register());
    toy_set_delay(20);
    CHECK_OK(td_init_process_group(NULL));
    static const char *const names[] = {"toy:0", "cpu", "toy:1"};
    td_device *device = td_device_get(names[td_get_rank(NULL)]);
    td_device_mapping mapping = {"toy:1", device};
    td_map_location map = {.mappings = &mapping, .count = 1};
    check_resumes(NULL, device);
    check_resumes(&map, device);
    check_resumes(td_get_rank(NULL) == 1 ? &map : NULL, device);
    CHECK_OK(td_destroy_process_group());
}

/* A rank whose map names a device that is not there: no rank loads anything. */
RANKS(a_missing_device_of_one_rank, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(toy_register());
    CHECK_OK(td_init_process_group(NULL));
    struct run run = begin_run(1, td_device_get("toy:1"));
    step(&run, 1);
    CHECK_OK(td_training_save(path(), &run.training, NULL));
    td_module *former = td_module_clone(run.net);
    step(&run, 2);
    td_module *now = td_module_clone(run.net);
    td_map_location map = {.mappings = &(td_device_mapping){"toy:1", td_device_get("toy:5")},
                           .count = 1};
    for (int bad = 0; bad < 2; bad++) {
        run.training.map_location = td_get_rank(NULL) == bad ? &map : NULL;
        CHECK_FAILS(td_training_load(path(), &run.training, NULL), TD_ERR_INVALID, "toy:5");
        check_same(run.net, now);
    }
    run.training.map_location = NULL;
    CHECK_OK(td_training_load(path(), &run.training, NULL));
    check_same(run.net, former);
    td_module_destroy(now);
    td_module_destroy(former);
    end_run(&run);
    CHECK_OK(td_destroy_process_group());
}

/* The newest checkpoint is not skipped for an older one since a device is missing. */
TEST(a_missing_device_does_not_load_an_older_checkpoint)
{
    CHECK_OK(toy_register());
    char directory[600], newest[700];
    snprintf(directory, sizeof directory, "%s/run", td_test_temp_dir());
    struct run run = begin_run(1, NULL);
    step(&run, 1);
    CHECK_OK(td_training_save_numbered(directory, &run.training, 0, NULL));
    end_run(&run);
    run = begin_run(1, td_device_get("toy:1"));
    run.training.step = 1;
    step(&run, 2);
    CHECK_OK(td_training_save_numbered(directory, &run.training, 0, NULL));
    snprintf(newest, sizeof newest, "%s/step-%012d.safetensors", directory, 2);
    rename_device(newest);
    bool loaded = true;
    run.training.map_location = &(td_map_location){.as_saved = true};
    CHECK_FAILS(td_training_load_latest(directory, &run.training, NULL, &loaded), TD_ERR_INVALID,
                "was saved on toy:7, which is not there; map_location");
    end_run(&run);
}

/* Without the optimizer, only the model gets into memory. */
TEST(parts_that_nobody_has_are_skipped)
{
    CHECK_OK(toy_register());
    td_device *toy = td_device_get("toy:0");
    struct run run = begin_run(1, toy);
    step(&run, 1);
    CHECK_OK(td_training_save(path(), &run.training, NULL));
    td_module *net = make_wide(2, toy);
    td_training only = {.model = net};
    td_memory_stats before, after;
    CHECK_OK(td_device_synchronize(toy));
    CHECK_OK(td_device_reset_peak(toy));
    CHECK_OK(td_device_memory_stats(toy, &before));
    CHECK_OK(td_training_load(path(), &only, NULL));
    CHECK_OK(td_device_memory_stats(toy, &after));
    CHECK(after.allocated_peak - before.allocated < (2 * LAYERS + 1) * LAYER_BYTES);
    check_same(run.net, net);
    td_module_destroy(net);
    end_run(&run);
}

/* ---- Loaders -------------------------------------------------------------------------------------------- */

/* A loader may go on while the device has not copied the batch yet. */
TEST(batches_in_pinned_memory)
{
    CHECK_OK(toy_register());
    td_device *toy = td_device_get("toy:0");
    float numbers[64];
    for (int i = 0; i < 64; i++)
        numbers[i] = (float)i;
    td_tensor *all = td_from_array(numbers, TD_SHAPE(64, 1), TD_F32, NULL);
    td_tensor *there = td_tensor_to(all, toy);
    CHECK(!td_tensor_dataset(there, NULL));
    CHECK_CONTAINS(td_last_error(), "the tensor is on toy:0, and samples are read by the host");
    td_dataset *dataset = td_tensor_dataset(all, NULL);
    for (int workers = 0; workers < 3; workers += 2) {
        td_loader *loader = td_loader_create(
            dataset, &(td_loader_options){.batch_size = 8, .workers = workers, .pin_memory = toy});
        CHECK(loader != NULL);
        td_tensor *copies[8];
        int count = 0;
        toy_hold(0, true);
        for (td_batch batch; td_loader_next(loader, &batch); count++) {
            CHECK(td_tensor_is_pinned(batch.input));
            copies[count] = td_tensor_to_async(batch.input, toy);
            CHECK(copies[count] != NULL);
        }
        CHECK_OK(td_loader_status(loader));
        td_loader_destroy(loader);
        toy_hold(0, false);
        CHECK_EQ(count, 8);
        for (int i = 0; i < 8; i++) {
            td_tensor *host = td_tensor_to(copies[i], td_device_get("cpu"));
            CHECK_MEM(td_tensor_data(host), numbers + 8 * i, 8 * sizeof numbers[0]);
            td_tensor_release(host);
            td_tensor_release(copies[i]);
        }
    }
    CHECK(!td_loader_create(dataset, &(td_loader_options){.pin_memory = td_device_get("toy:9")}));
    CHECK_CONTAINS(td_last_error(), "toy:9");
    td_dataset_release(dataset);
    td_tensor_release(there);
    td_tensor_release(all);
}
