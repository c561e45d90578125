/* Files and batches on their way to accelerators: map_location, loading in pieces, and pin_memory. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/checkpoint.h>
#include <tandem/ops.h>

#include <stdio.h>
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

TEST(a_device_that_is_not_there_is_named)
{
    save_four();
    FILE *file = fopen(path(), "r+b");
    char text[512] = "";
    CHECK(fread(text, 1, sizeof text - 1, file) > 0);
    for (size_t i = 0; i + 8 < sizeof text;
         i++) /* toy:1 becomes toy:7, and the checksum is not looked at yet */
        if (!memcmp(text + i, "toy:1*1", 7))
            CHECK(!fseek(file, (long)i + 4, SEEK_SET) && fputc('7', file) == '7');
    fclose(file);
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
