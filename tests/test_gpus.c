/* How many GPUs CUDA_VISIBLE_DEVICES leaves, on machines that are made of files in a temporary directory. The
 * expected numbers are those of cuDeviceGetCount(), with one GPU and a driver of version 580. */
#include "runner.h"

#include "launch/options.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static char dev[256], driver[256];

static void make_directory(char path[256], const char *name)
{
    snprintf(path, 256, "%s/%s", td_test_temp_dir(), name);
    CHECK(!mkdir(path, 0755));
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    CHECK(file);
    fputs(text, file);
    CHECK(!fclose(file));
}

static void make_machine(void)
{
    make_directory(dev, "dev");
    make_directory(driver, "gpus");
    static const char *const others[] = {"nvidiactl", "nvidia-uvm", "nvidia", "nvidia1x", "null"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char path[600];
        snprintf(path, sizeof path, "%s/%s", dev, others[i]);
        write_file(path, "");
    }
}

static void add_gpu(int minor, const char *uuid)
{
    char path[600], text[256];
    snprintf(path, sizeof path, "%s/nvidia%d", dev, minor);
    write_file(path, "");
    snprintf(path, sizeof path, "%s/0000:00:%02x.0", driver, minor);
    CHECK(!mkdir(path, 0755));
    strcat(path, "/information");
    snprintf(text, sizeof text, "Model: \t\t Some GPU\nGPU UUID: \t %s\nDevice Minor: \t %d\n",
             uuid, minor);
    write_file(path, text);
}

static int visible(const char *list)
{
    struct td__gpus gpus;
    td__gpus_find(dev, driver, &gpus);
    return td__gpus_visible(&gpus, list);
}

TEST(none)
{
    make_machine();
    CHECK_EQ(visible(NULL), 0);
    CHECK_EQ(visible("0"), 0);
    CHECK_EQ(visible("GPU-1"), 0);
    CHECK_EQ(visible("MIG-1"), 0);
    struct td__gpus gpus;
    td__gpus_find("/no/such/directory", "/no/such/directory", &gpus);
    CHECK_EQ(gpus.count, 0);
}

TEST(numbers)
{
    make_machine();
    for (int i = 0; i < 4; i++)
        add_gpu(i, "GPU-0");
    static const struct {
        const char *list;
        int count;
    } cases[] = {
        {NULL, 4},      {"", 0},           {"0", 1},       {"3", 1},
        {"0,1,2,3", 4}, {"3,1", 2},        {" 0, 2 ", 2},  {"+1", 1},
        {"00", 1},      {"1gpu,2x", 2},    {"0;1", 1},     {"4", 0},
        {"0,4,1", 1},   {"4,0", 0},        {"-1", 0},      {"1,-1,2", 1},
        {"x", 0},       {"0,x,1", 1},      {",0", 0},      {"0,", 1},
        {"0,,1", 1},    {"0,0", 0},        {"1,2,1", 0},   {"0, 0", 0},
        {"0,-1,0", 1},  {"NoDevFiles", 0}, {"0,GPU-0", 1}, {"99999999999999999999", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_EQ(visible(cases[i].list), cases[i].count);
}

TEST(uuids)
{
    make_machine();
    add_gpu(0, "GPU-e8eefa26-05e0-21c9-5630-aa76d6070631");
    add_gpu(7, "GPU-e8bb0000-05e0-21c9-5630-aa76d6070631");
    CHECK_EQ(visible(NULL), 2);
    CHECK_EQ(visible("GPU-e8eefa26-05e0-21c9-5630-aa76d6070631"), 1);
    CHECK_EQ(visible("GPU-E8EEFA26-05E0-21C9-5630-AA76D6070631"), 1);
    CHECK_EQ(visible("GPU-e8eefa26-05e0-21c9-5630-aa76d6070631 ,GPU-e8bb"), 2);
    CHECK_EQ(visible("GPU-e8ee,GPU-e8bb"), 2);
    CHECK_EQ(visible("GPU-e8bb,GPU-e8"), 1); /* two begin like this */
    CHECK_EQ(visible("GPU-"), 0);
    CHECK_EQ(visible("GPU"), 0);
    CHECK_EQ(visible("gpu-e8ee"), 0);
    CHECK_EQ(visible(" GPU-e8ee"), 0);
    CHECK_EQ(visible("GPU-e8ee,GPU-zz,GPU-e8bb"), 1);
    CHECK_EQ(visible("GPU-e8ee,1"), 1);
    CHECK_EQ(visible("GPU-e8ee,GPU-e8eefa"), 0);
    CHECK_EQ(visible("MIG-e8ee,MIG-e8bb"), 1);
}

TEST(uuids_that_the_driver_does_not_tell)
{
    make_machine();
    char path[600];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/nvidia%d", dev, i);
        write_file(path, "");
    }
    CHECK_EQ(visible("1,0"), 2);
    CHECK_EQ(visible("GPU-1"), 1);
    CHECK_EQ(visible("GPU-1,GPU-2,GPU-3"), 2);
}
