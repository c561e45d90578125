/* Datasets of files: IDX, packed or not, whole or damaged; Fashion-MNIST; text. */
#include "runner.h"

#include <tandem/tandem.h>

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

static const char *path_of(const char *name)
{
    static char paths[4][300];
    static int turn;
    char *path = paths[turn = (turn + 1) % 4];
    snprintf(path, sizeof paths[0], "%s/%s", td_test_temp_dir(), name);
    return path;
}

static void write_file(const char *name, const void *data, size_t size)
{
    FILE *file = fopen(path_of(name), "wb");
    CHECK(file && fwrite(data, 1, size, file) == size && fclose(file) == 0);
}

/* Returns the bytes of the packed data, in a buffer of its own. */
static size_t pack(const void *data, size_t size, unsigned char *packed, size_t room)
{
    z_stream stream = {0};
    CHECK_EQ(deflateInit2(&stream, 9, Z_DEFLATED, 16 + MAX_WBITS, 9, Z_DEFAULT_STRATEGY), Z_OK);
    stream.next_in = (unsigned char *)(uintptr_t)data;
    stream.avail_in = (unsigned)size;
    stream.next_out = packed;
    stream.avail_out = (unsigned)room;
    CHECK_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
    deflateEnd(&stream);
    return room - stream.avail_out;
}

/* Three images of 2 x 4 bytes, and their labels. */
static const unsigned char images[16 + 24] = {
    0, 0, 8, 3, 0,  0,  0,  3,  0,  0,  0,  2,  0,  0,   0,   4,   0,   1,  2,  3,
    4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17, 20, 255, 254, 128, 127, 25, 26, 27};
static const unsigned char labels[8 + 3] = {0, 0, 8, 1, 0, 0, 0, 3, 9, 0, 200};

/* ---- Whole files ----------------------------------------------------------------------------- */

static void check_images(td_dataset *dataset, float mean, float std)
{
    CHECK(dataset);
    CHECK_EQ(td_dataset_size(dataset), 3);
    td_sample_spec input, target;
    td_dataset_describe(dataset, &input, &target);
    CHECK(input.dtype == TD_F32 && input.ndim == 3);
    CHECK(input.shape[0] == 1 && input.shape[1] == 2 && input.shape[2] == 4);
    CHECK(target.dtype == TD_I64 && target.ndim == 0);
    for (int64_t i = 0; i < 3; i++) {
        float image[8];
        int64_t label;
        CHECK_OK(td_dataset_read(dataset, i, image, &label));
        CHECK_EQ(label, labels[8 + i]);
        for (int k = 0; k < 8; k++)
            CHECK(image[k] == ((float)images[16 + 8 * i + k] / 255.0f - mean) / std);
    }
    td_dataset_release(dataset);
}

TEST(idx_files)
{
    unsigned char packed[300];
    write_file("images", images, sizeof images);
    write_file("labels", labels, sizeof labels);
    /* The name says nothing: what is packed has no ".gz", and the other way round. */
    write_file("packed-images", packed, pack(images, sizeof images, packed, sizeof packed));
    write_file("plain-labels.gz", labels, sizeof labels);
    check_images(td_idx_dataset(path_of("images"), path_of("labels"), NULL), 0, 1);
    check_images(td_idx_dataset(path_of("packed-images"), path_of("plain-labels.gz"), NULL), 0, 1);
    td_idx_options options = {.mean = 0.1307, .std = 0.3081};
    check_images(td_idx_dataset(path_of("images"), path_of("labels"), &options), 0.1307f, 0.3081f);
    options.pixels = TD_PIXELS_UNIT;
    check_images(td_idx_dataset(path_of("images"), path_of("labels"), &options), 0, 1);

    td_dataset *raw = td_idx_dataset(path_of("packed-images"), NULL,
                                     &(td_idx_options){.pixels = TD_PIXELS_RAW});
    td_sample_spec input, target;
    td_dataset_describe(raw, &input, &target);
    CHECK(input.dtype == TD_U8 && input.ndim == 2 && target.ndim == -1);
    unsigned char image[8];
    CHECK_OK(td_dataset_read(raw, 2, image, NULL));
    CHECK_MEM(image, images + 32, 8);
    td_dataset_release(raw);
}

TEST(members_that_follow_each_other)
{
    unsigned char packed[600];
    size_t size = pack(images, 20, packed, sizeof packed);
    size += pack(images + 20, 0, packed + size, sizeof packed - size);
    size += pack(images + 20, 20, packed + size, sizeof packed - size);
    write_file("images", packed, size);
    write_file("labels", labels, sizeof labels);
    check_images(td_idx_dataset(path_of("images"), path_of("labels"), NULL), 0, 1);
    packed[size] = 'x';
    write_file("images", packed, size + 1);
    CHECK(!td_idx_dataset(path_of("images"), NULL, NULL));
    CHECK_CONTAINS(td_last_error(), "is not gzip");
}

TEST(other_types)
{
    const unsigned char halves[] = {0, 0, 11, 2, 0,    0,    0, 2, 0,    0,
                                    0, 2, 1,  2, 0xff, 0xfe, 0, 5, 0x80, 0};
    const unsigned char words[] = {0, 0, 12, 1, 0, 0, 0, 2, 0xff, 0xff, 0xff, 0xfd, 0, 1, 0, 0};
    const unsigned char floats[] = {0, 0, 13, 1, 0, 0, 0, 1, 0xc0, 0x20, 0, 0};
    const unsigned char doubles[] = {0, 0, 14, 1, 0, 0, 0, 1, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0};
    const unsigned char none[] = {0, 0, 8, 3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 2};
    write_file("halves", halves, sizeof halves);
    write_file("words", words, sizeof words);
    write_file("floats", floats, sizeof floats);
    write_file("doubles", doubles, sizeof doubles);
    write_file("none", none, sizeof none);
    td_idx_options raw = {.pixels = TD_PIXELS_RAW};
    int16_t pair[2];
    int64_t label;
    td_dataset *dataset = td_idx_dataset(path_of("halves"), path_of("words"), &raw);
    CHECK(dataset);
    CHECK_OK(td_dataset_read(dataset, 0, pair, &label));
    CHECK(pair[0] == 0x102 && pair[1] == -2 && label == -3);
    CHECK_OK(td_dataset_read(dataset, 1, pair, &label));
    CHECK(pair[0] == 5 && pair[1] == -32768 && label == 65536);
    td_dataset_release(dataset);

    float number;
    dataset = td_idx_dataset(path_of("floats"), NULL, &raw);
    CHECK_OK(td_dataset_read(dataset, 0, &number, NULL));
    CHECK(number == -2.5f);
    td_dataset_release(dataset);
    double real;
    dataset = td_idx_dataset(path_of("doubles"), NULL, &raw);
    CHECK_OK(td_dataset_read(dataset, 0, &real, NULL));
    CHECK(real == 1.5);
    td_dataset_release(dataset);

    dataset = td_idx_dataset(path_of("none"), NULL, NULL);
    CHECK_EQ(td_dataset_size(dataset), 0);
    CHECK_FAILS(td_dataset_read(dataset, 0, &number, NULL), TD_ERR_INVALID, "no sample 0");
    td_dataset_release(dataset);

    CHECK(!td_idx_dataset(path_of("halves"), NULL, NULL));
    CHECK_CONTAINS(td_last_error(), "elements of i16; only bytes can be scaled");
    CHECK(!td_idx_dataset(path_of("words"), path_of("floats"), &raw));
    CHECK_CONTAINS(td_last_error(), "labels are one dimension of integers");
    CHECK(!td_idx_dataset(path_of("words"), path_of("none"), &raw));
    CHECK_CONTAINS(td_last_error(), "3 dimensions of u8");
}

/* ---- Damaged files --------------------------------------------------------------------------- */

static void refuse(const void *data, size_t size, const char *part)
{
    write_file("damaged", data, size);
    if (td_idx_dataset(path_of("damaged"), NULL, NULL))
        FAIL("a damaged file of %zu bytes was read", size);
    CHECK_CONTAINS(td_last_error(), path_of("damaged"));
    CHECK_CONTAINS(td_last_error(), part);
}

TEST(truncated_files)
{
    char part[64];
    for (size_t size = 0; size < sizeof images; size++) {
        size_t header = size < 4 ? size : size < 16 ? size : 16;
        snprintf(part, sizeof part, "offset %zu", header);
        refuse(images, size, part);
    }
    unsigned char packed[300];
    size_t whole = pack(images, sizeof images, packed, sizeof packed);
    for (size_t size = 2; size < whole; size++) {
        snprintf(part, sizeof part, "ends too early, at offset %zu of the file", size);
        refuse(packed, size, part);
    }
}

TEST(hostile_files)
{
    unsigned char copy[sizeof images + 1];
    memcpy(copy, images, sizeof images);
    refuse(copy, sizeof copy, "offset 40: the file should end here");
    copy[0] = 1;
    refuse(copy, sizeof images, "the file begins with 01 00 08 03");
    memcpy(copy, images, sizeof images);
    copy[2] = 10;
    refuse(copy, sizeof images, "the file begins with 00 00 0a 03");
    copy[2] = 8;
    copy[3] = 0;
    refuse(copy, sizeof images, "offset 4: the array has 0 dimensions");
    copy[3] = 9;
    refuse(copy, sizeof images, "9 dimensions; 1 to 8");
    memcpy(copy, images, sizeof images);
    memset(copy + 4, 0xff, 12);
    refuse(copy, sizeof images, "offset 16");
    CHECK_CONTAINS(td_last_error(), "too large");
    for (int size = 4; size < 16; size += 4)
        copy[size] = copy[size + 1] = 0;
    refuse(copy, sizeof images, "the file has 24 more");

    /* A packed file that promises more than its size can hold, and one that promises what it could. */
    unsigned char packed[300];
    size_t size = pack(copy, sizeof images, packed, sizeof packed);
    refuse(packed, size, "cannot hold more than");
    memcpy(copy, images, sizeof images);
    copy[7] = 200;
    size = pack(copy, sizeof images, packed, sizeof packed);
    refuse(packed, size,
           "offset 40 of what is unpacked: the file ends here, 1576 bytes of the elements");
    size = pack(images, sizeof images, packed, sizeof packed);
    packed[size - 6] ^= 1; /* its checksum */
    refuse(packed, size, "corrupt at offset");
    packed[size - 6] ^= 1;
    packed[2] = 99; /* its method */
    refuse(packed, size, "corrupt");
}

TEST(malformed_files)
{
    CHECK(!td_idx_dataset(path_of("missing"), NULL, NULL));
    CHECK_CONTAINS(td_last_error(), "missing: cannot be opened: No such file");
    CHECK(!td_idx_dataset(NULL, NULL, NULL));
    CHECK(!td_idx_dataset(td_test_temp_dir(), NULL, NULL));
    CHECK_CONTAINS(td_last_error(), "not a regular file");
    CHECK_EQ(mkfifo(path_of("pipe"), 0600), 0);
    CHECK(
        !td_idx_dataset(path_of("pipe"), NULL, NULL)); /* no process writes, and it does not wait */
    CHECK(!td_text_dataset(path_of("pipe"), 4));
    CHECK_CONTAINS(td_last_error(), "not a regular file");

    write_file("images", images, sizeof images);
    const unsigned char four[] = {0, 0, 8, 1, 0, 0, 0, 4, 1, 2, 3, 4};
    write_file("labels", four, sizeof four);
    CHECK(!td_idx_dataset(path_of("images"), path_of("labels"), NULL));
    CHECK_CONTAINS(td_last_error(), "has 3 images");
    CHECK_CONTAINS(td_last_error(), "has 4 labels");
    CHECK(!td_idx_dataset(path_of("images"), NULL, &(td_idx_options){.mean = 1}));
    CHECK(!td_idx_dataset(path_of("images"), NULL, &(td_idx_options){.std = -1}));
    CHECK(!td_idx_dataset(path_of("images"), NULL, &(td_idx_options){.std = NAN}));
    CHECK(!td_idx_dataset(path_of("images"), NULL, &(td_idx_options){.pixels = 7}));
    CHECK_CONTAINS(td_last_error(), "pixels is 7");
}

/* ---- Fashion-MNIST --------------------------------------------------------------------------- */

TEST(fashion_mnist_from_a_directory)
{
    const unsigned char train[] = {0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 51};
    const unsigned char seven[] = {0, 0, 8, 1, 0, 0, 0, 1, 7};
    float pixel;
    int64_t label;
    CHECK_EQ(mkdir(path_of("fashion-mnist"), 0700), 0);
    write_file("fashion-mnist/train-images-idx3-ubyte", train, sizeof train);
    write_file("fashion-mnist/train-labels-idx1-ubyte.gz", seven, sizeof seven);
    CHECK_EQ(setenv("TANDEM_DATA", td_test_temp_dir(), 1), 0);
    td_dataset *dataset = td_fashion_mnist(TD_TRAIN, NULL);
    CHECK_OK(td_dataset_read(dataset, 0, &pixel, &label));
    CHECK(pixel == (51 / 255.0f - 0.2860f) / 0.3530f && label == 7);
    td_dataset_release(dataset);
    CHECK_EQ(setenv("TANDEM_DATA", path_of("fashion-mnist"), 1), 0);
    dataset = td_fashion_mnist(TD_TRAIN, &(td_idx_options){.pixels = TD_PIXELS_UNIT});
    CHECK_OK(td_dataset_read(dataset, 0, &pixel, &label));
    CHECK(pixel == 0.2f);
    td_dataset_release(dataset);

    CHECK(!td_fashion_mnist(TD_TEST, NULL));
    CHECK_CONTAINS(td_last_error(), "there is no t10k-images-idx3-ubyte.gz in");
    CHECK_CONTAINS(td_last_error(), "apt install dataset-fashion-mnist");
    CHECK(!td_fashion_mnist(TD_TRAIN, &(td_idx_options){.directory = path_of("elsewhere")}));
    CHECK_CONTAINS(td_last_error(), path_of("elsewhere"));
    CHECK(!td_fashion_mnist((td_dataset_part)5, NULL));
    unsetenv("TANDEM_DATA");
    dataset = td_fashion_mnist(TD_TRAIN, &(td_idx_options){.directory = path_of("fashion-mnist")});
    CHECK(dataset);
    td_dataset_release(dataset);
}

TEST(fashion_mnist_of_the_package)
{
    td_dataset *test = td_fashion_mnist(TD_TEST, &(td_idx_options){.pixels = TD_PIXELS_RAW});
    if (!test)
        td_test_skip("%s", td_last_error());
    CHECK_EQ(td_dataset_size(test), 10000);
    unsigned char image[28 * 28];
    int64_t label, first[] = {9, 2, 1, 1, 6}, pixels = 0;
    for (int64_t i = 0; i < 5; i++) {
        CHECK_OK(td_dataset_read(test, i, image, &label));
        CHECK_EQ(label, first[i]);
    }
    for (int64_t i = 0; i < 10000; i++) {
        CHECK_OK(td_dataset_read(test, i, image, &label));
        CHECK(label >= 0 && label <= 9);
        for (int k = 0; k < 28 * 28; k++)
            pixels += image[k];
    }
    CHECK_EQ(pixels, 573469082);
    td_dataset_release(test);
}

/* The loop of a training program, as users write it, without a model. */
RANKS(the_loop_of_a_program, .ranks = 2)
{
    enum { IMAGES = 21 };
    unsigned char pixels[16 + IMAGES * 4] = {0, 0, 8, 3, 0, 0, 0, IMAGES, 0, 0, 0, 2, 0, 0, 0, 2};
    unsigned char classes[8 + IMAGES] = {0, 0, 8, 1, 0, 0, 0, IMAGES};
    for (int i = 0; i < IMAGES; i++) {
        memset(pixels + 16 + 4 * i, i, 4);
        classes[8 + i] = (unsigned char)i;
    }
    if (td_test_rank() == 0) {
        write_file("train-images-idx3-ubyte", pixels, sizeof pixels);
        write_file("train-labels-idx1-ubyte", classes, sizeof classes);
    }
    td_test_barrier();
    CHECK_EQ(setenv("TANDEM_DATA", td_test_temp_dir(), 1), 0);

    CHECK_OK(td_init_process_group(NULL));
    td_dataset *train = td_fashion_mnist(TD_TRAIN, &(td_idx_options){.pixels = TD_PIXELS_UNIT});
    td_sampler *sampler = td_distributed_sampler(train, NULL);
    td_loader *loader = td_loader_create(train,
                                         &(td_loader_options){.batch_size = 4, .sampler = sampler});
    int64_t orders[2][11] = {{0}};
    for (int epoch = 0; epoch < 2; epoch++) {
        int64_t count = 0;
        td_sampler_set_epoch(sampler, epoch);
        for (td_batch b; td_loader_next(loader, &b);) {
            TD_SCOPE;
            td_tensor *shown = td_clone(b.input);
            CHECK(td_tensor_ndim(shown) == 4 && td_tensor_size(shown, 1) == 1);
            for (int64_t i = 0; i < b.size; i++, count++) {
                orders[epoch][count] = ((int64_t *)td_tensor_data(b.target))[i];
                float pixel = 255 * ((float *)td_tensor_data(shown))[4 * i];
                CHECK(fabsf(pixel - (float)orders[epoch][count]) < 1e-3f);
            }
        }
        CHECK_OK(td_loader_status(loader));
        CHECK_EQ(count, 11);
    }
    CHECK(memcmp(orders[0], orders[1], sizeof orders[0]) != 0);

    /* Both shares together are all images, one of them twice. */
    int64_t both[2][11], seen[IMAGES] = {0};
    CHECK_OK(td_group_all_gather(both, orders[0], 11, TD_I64, NULL, NULL));
    for (int i = 0; i < 22; i++)
        seen[both[i / 11][i % 11]]++;
    for (int i = 0; i < IMAGES; i++)
        CHECK(seen[i] >= 1 && seen[i] <= 2);
    CHECK_OK(td_destroy_process_group());
    td_loader_destroy(loader);
    td_sampler_release(sampler);
    td_dataset_release(train);
}

/* ---- Text ------------------------------------------------------------------------------------ */

TEST(text)
{
    const unsigned char text[] = "The quick brown \xc3\xa4\xff\x80";
    write_file("text", text, 20);
    int64_t input[6], target[6];
    td_dataset *dataset = td_text_dataset(path_of("text"), 6);
    CHECK_EQ(td_dataset_size(dataset), 3);
    for (int64_t i = 0; i < 3; i++) {
        CHECK_OK(td_dataset_read(dataset, i, input, target));
        for (int k = 0; k < 6; k++) {
            CHECK_EQ(input[k], text[6 * i + k]);
            CHECK_EQ(target[k], text[6 * i + k + 1]);
        }
    }
    /* Shorter than it was. */
    CHECK_EQ(truncate(path_of("text"), 15), 0);
    CHECK_OK(td_dataset_read(dataset, 1, input, target));
    CHECK_FAILS(td_dataset_read(dataset, 2, input, target), TD_ERR_INVALID, "ends at offset 15");
    CHECK_EQ(truncate(path_of("text"), 12), 0);
    CHECK_FAILS(td_dataset_read(dataset, 2, input, target), TD_ERR_INVALID, "ends at offset 12");
    td_dataset_release(dataset);

    for (int64_t length = 1; length < 12; length++) {
        dataset = td_text_dataset(path_of("text"), length);
        CHECK_EQ(td_dataset_size(dataset), 11 / length);
        int64_t in[12], out[12];
        CHECK_OK(td_dataset_read(dataset, td_dataset_size(dataset) - 1, in, out));
        CHECK_EQ(out[length - 1], text[td_dataset_size(dataset) * length]);
        td_dataset_release(dataset);
    }
    CHECK(!td_text_dataset(path_of("text"), 12));
    CHECK_CONTAINS(td_last_error(), "has 12 bytes; one sequence of 12 needs one more");
    write_file("empty", "", 0);
    CHECK(!td_text_dataset(path_of("empty"), 1));
    CHECK(!td_text_dataset(path_of("missing"), 1));
    CHECK_CONTAINS(td_last_error(), "cannot be opened");
    CHECK(!td_text_dataset(path_of("text"), 0) && !td_text_dataset(NULL, 3));
    CHECK(!td_text_dataset(path_of("text"), INT64_MAX));
}

/* ---- Tokens ----------------------------------------------------------------------------------- */

/* Every sequence of a file of `count` tokens behind a header of `offset` bytes. */
static void check_tokens(int bytes, int64_t offset, int64_t length, const uint32_t *numbers,
                         int64_t count)
{
    td_dataset *dataset = td_token_dataset(path_of("tokens"), length,
                                           &(td_token_options){.bytes = bytes, .offset = offset});
    CHECK_EQ(td_dataset_size(dataset), (count - 1) / length);
    for (int64_t i = 0; i < td_dataset_size(dataset); i++) {
        int64_t input[16], target[16];
        CHECK_OK(td_dataset_read(dataset, i, input, target));
        for (int64_t k = 0; k < length; k++) {
            CHECK_EQ(input[k], numbers[i * length + k]);
            CHECK_EQ(target[k], numbers[i * length + k + 1]);
        }
    }
    td_dataset_release(dataset);
}

TEST(tokens)
{
    const uint32_t numbers[] = {50256, 1, 65535, 0, 256, 4294967295, 7, 8, 9, 10, 11};
    enum { COUNT = sizeof numbers / sizeof numbers[0], HEADER = 12 };
    for (int bytes = 2; bytes <= 4; bytes += 2) {
        unsigned char file[HEADER + 4 * COUNT] = "a header";
        uint32_t expected[COUNT];
        for (int i = 0; i < COUNT; i++) {
            expected[i] = bytes == 2 ? numbers[i] & 0xffff : numbers[i];
            for (int b = 0; b < bytes; b++)
                file[HEADER + i * bytes + b] = (unsigned char)(expected[i] >> 8 * b);
        }
        /* One byte more is no token. */
        write_file("tokens", file, (size_t)(HEADER + bytes * COUNT + (bytes == 2)));
        for (int64_t length = 1; length < COUNT; length++)
            check_tokens(bytes, HEADER, length, expected, COUNT);
        CHECK(!td_token_dataset(path_of("tokens"), COUNT,
                                &(td_token_options){.bytes = bytes, .offset = HEADER}));
        CHECK_CONTAINS(td_last_error(), "has 11 tokens; one sequence of 11 needs one more");
    }
    CHECK(!td_token_dataset(path_of("tokens"), 1, &(td_token_options){.offset = 1000}));
    CHECK_CONTAINS(td_last_error(), "has 0 tokens");
    CHECK(!td_token_dataset(path_of("tokens"), 1, &(td_token_options){.bytes = 3}));
    CHECK_CONTAINS(td_last_error(), "tokens of 3 bytes");
    CHECK(!td_token_dataset(path_of("tokens"), 1, &(td_token_options){.offset = -1}));
    CHECK(!td_token_dataset(NULL, 1, NULL));
}
