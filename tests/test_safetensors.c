/* Safetensors files: recorded ones of other programs, written files read back here and by a reader in Python,
 * hostile and damaged ones, and failures of disks and directories. */
#include "runner.h"

#include <tandem/tandem.h>

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

static const char *temp_path(const char *name)
{
    static char path[4][512];
    static int next;
    char *text = path[next++ % 4];
    snprintf(text, sizeof path[0], "%s/%s", td_test_temp_dir(), name);
    return text;
}

static td_state *load_recorded(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, TD_SAFETENSORS_DIR "/%s.safetensors", name);
    td_state *state = td_load_safetensors(path, NULL);
    if (!state)
        FAIL("%s: %s", name, td_last_error());
    return state;
}

static void write_file(const char *path, const void *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    CHECK_EQ(fwrite(data, 1, size, file), size);
    CHECK_EQ(fclose(file), 0);
}

static size_t read_file(const char *path, char *data, size_t room)
{
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    size_t size = fread(data, 1, room, file);
    CHECK(size < room);
    fclose(file);
    return size;
}

/* ---- Files of others ------------------------------------------------------------------------------ */

static void check_tensor(const td_state *state, const char *name, td_dtype dtype, const void *data,
                         size_t size)
{
    const td_tensor *tensor = td_state_get(state, name);
    if (!tensor)
        FAIL("there is no %s", name);
    CHECK_EQ(td_tensor_dtype(tensor), dtype);
    CHECK_EQ(td_tensor_nbytes(tensor), size);
    CHECK_MEM(td_tensor_data(tensor), data, size);
}

#define CHECK_TENSOR(state, name, dtype, type, ...)                                                \
    check_tensor(state, name, dtype, (type[]){__VA_ARGS__}, sizeof((type[]){__VA_ARGS__}))

static void check_all_dtypes(const td_state *state)
{
    CHECK_EQ(td_state_count(state), 13);
    CHECK_TENSOR(state, "f64", TD_F64, double, 0.1, -1e300);
    CHECK_TENSOR(state, "i64", TD_I64, int64_t, INT64_MIN, INT64_MAX);
    CHECK_TENSOR(state, "u64", TD_U64, uint64_t, 0, UINT64_MAX);
    CHECK_TENSOR(state, "c64", TD_COMPLEX64, float, 1.5f, -2.5f, 0.25f, 4);
    CHECK_TENSOR(state, "f32", TD_F32, float, 0, 1, 2, 3, 4.5f, -5.25f);
    CHECK_TENSOR(state, "i32", TD_I32, int32_t, INT32_MIN, INT32_MAX);
    CHECK_TENSOR(state, "u32", TD_U32, uint32_t, 0, UINT32_MAX);
    CHECK_TENSOR(state, "f16", TD_F16, uint16_t, 0x3c00, 0xc100, 0x7bff);
    CHECK_TENSOR(state, "bf16", TD_BF16, uint16_t, 0x3f80, 0xc060);
    CHECK_TENSOR(state, "i16", TD_I16, int16_t, INT16_MIN, INT16_MAX);
    CHECK_TENSOR(state, "i8", TD_I8, int8_t, -128, 0, 127);
    CHECK_TENSOR(state, "u8", TD_U8, uint8_t, 0, 1, 255);
    CHECK_TENSOR(state, "bool", TD_BOOL, uint8_t, 1, 0, 1);
    CHECK_EQ(td_tensor_ndim(td_state_get(state, "f32")), 2);
    CHECK_EQ(td_tensor_size(td_state_get(state, "f32"), 1), 3);
}

TEST(reads_recorded_files)
{
    static const char *const names[] = {"all_dtypes", "backwards", "padded", "unpadded"};
    for (int i = 0; i < 4; i++) {
        td_state *state = load_recorded(names[i]);
        check_all_dtypes(state);
        CHECK_STR(td_state_name(state, 0), i == 1 ? "bool" : "f64");
        td_state_destroy(state);
    }
}

TEST(reads_small_and_empty_tensors)
{
    td_state *state = load_recorded("small");
    CHECK_EQ(td_state_count(state), 5);
    CHECK_TENSOR(state, "scalar", TD_F64, double, 3.25);
    CHECK_EQ(td_tensor_ndim(td_state_get(state, "scalar")), 0);
    CHECK_EQ(td_tensor_ndim(td_state_get(state, "one")), 8);
    CHECK_EQ(td_tensor_size(td_state_get(state, "none_of_many"), 2), 7);
    CHECK_EQ(td_tensor_numel(td_state_get(state, "none_at_the_end")), 0);
    td_state_destroy(state);
    state = load_recorded("nothing");
    CHECK_EQ(td_state_count(state), 0);
    td_state_destroy(state);
    state = load_recorded("only_metadata");
    CHECK_EQ(td_state_count(state), 0);
    td_state_destroy(state);
    state = load_recorded("unknown_field");
    CHECK_TENSOR(state, "x", TD_F64, double, 0.1, -1e300);
    td_state_destroy(state);
}

static void join_note(const char *key, const char *value, void *arg)
{
    size_t used = strlen(arg);
    snprintf((char *)arg + used, 512 - used, "%s=%s;", key, value);
}

TEST(reads_names_beyond_ascii)
{
    static const char *const files[] = {"unicode", "unicode_escaped"};
    static const char *const names[] = {"größe",          "重み.0", "😀", "quote\"back\\slash",
                                        "tab\tline\nend", "a/b c"};
    for (int f = 0; f < 2; f++) {
        td_state *state = load_recorded(files[f]);
        for (uint8_t i = 0; i < 6; i++)
            check_tensor(state, names[i], TD_U8, &i, 1);
        td_state_destroy(state);
        char path[512], notes[512] = "";
        snprintf(path, sizeof path, TD_SAFETENSORS_DIR "/%s.safetensors", files[f]);
        CHECK_OK(td_read_safetensors_notes(path, join_note, notes));
        CHECK_STR(notes, "spräche=日本語 😀;");
    }
}

/* ---- There and back ------------------------------------------------------------------------------- */

/* Tensors of all dtypes that are there, of odd strides and devices, some empty. */
static td_state *make_state(void)
{
    static const td_dtype dtypes[] = {TD_BOOL, TD_F32, TD_I8,  TD_F64, TD_U8,        TD_F16, TD_I64,
                                      TD_BF16, TD_I16, TD_I32, TD_U32, TD_COMPLEX64, TD_U64};
    td_state *state = td_state_create();
    for (int i = 0; i < 13; i++) {
        TD_SCOPE;
        char name[32];
        snprintf(name, sizeof name, "größe \"%s\"", td_dtype_name(dtypes[i]));
        td_tensor *x = td_full(SHAPE(3, 5), i % 3, dtypes[i], NULL);
        CHECK_OK(td_state_add(state, name, i % 2 ? td_transpose(x, 0, 1) : x));
    }
    {
        TD_SCOPE;
        td_tensor *x = td_arange(0, 12, 1, TD_F32, NULL);
        CHECK_OK(td_state_add(state, "strided", td_transpose(td_reshape(x, SHAPE(3, 4)), 0, 1)));
        CHECK_OK(td_state_add(state, "elsewhere", td_tensor_to(x, td_device_get("cpu:1"))));
        CHECK_OK(td_state_add(state, "empty", td_zeros(SHAPE(0, 3), TD_F32, NULL)));
    }
    CHECK_OK(td_state_add_number(state, "number", 0.5));
    return state;
}

static void check_equal(const td_state *a, const td_state *b)
{
    CHECK_EQ(td_state_count(a), td_state_count(b));
    for (int i = 0; i < td_state_count(a); i++) {
        TD_SCOPE;
        td_tensor *x = td_contiguous(td_state_tensor(a, i)),
                  *y = td_contiguous(td_state_tensor(b, i));
        CHECK_STR(td_state_name(a, i), td_state_name(b, i));
        CHECK_EQ(td_tensor_dtype(x), td_tensor_dtype(y));
        CHECK_EQ(td_tensor_ndim(x), td_tensor_ndim(y));
        for (int d = 0; d < td_tensor_ndim(x); d++)
            CHECK_EQ(td_tensor_size(x, d), td_tensor_size(y, d));
        CHECK_MEM(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x));
    }
}

TEST(writes_what_it_reads)
{
    td_state *state = make_state();
    const char *path = temp_path("a.safetensors");
    td_file_note notes[] = {{"author", "näme \"x\"\n"}, {"empty", ""}};
    CHECK_OK(td_save_safetensors(path, state, notes, 2));
    td_state *back = td_load_safetensors(path, NULL);
    CHECK(back != NULL);
    check_equal(state, back);
    char text[512] = "";
    CHECK_OK(td_read_safetensors_notes(path, join_note, text));
    CHECK_CONTAINS(text, "tandem.version=1;tandem.sha256=");
    CHECK_CONTAINS(text, ";author=näme \"x\"\n;empty=;");
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 1);
    td_state_destroy(back);

    back = td_load_safetensors(path, &(td_map_location){.device = td_device_get("cpu:1")});
    CHECK(back != NULL);
    check_equal(state, back);
    for (int i = 0; i < td_state_count(back); i++)
        CHECK_STR(td_device_name(td_tensor_device(td_state_tensor(back, i))), "cpu:1");
    td_state_destroy(back);
    CHECK(!td_load_safetensors(path, &(td_map_location){.device = td_device_get("gpu:7")}));
    td_state_destroy(state);
}

/* A reader of the format that shares no code with this one. */
TEST(python_reads_what_is_written)
{
    td_state *state = make_state();
    const char *path = temp_path("a.safetensors");
    CHECK_OK(td_save_safetensors(path, state, NULL, 0));
    struct td_test_child child = td_test_exec((const char *const[]){
        "python3", TD_SAFETENSORS_DIR "/../record_safetensors.py", "--read", path, NULL});
    if (WIFEXITED(child.status) && WEXITSTATUS(child.status) == 127)
        td_test_skip("there is no python3");
    if (child.status)
        FAIL("%s", child.output);
    CHECK_CONTAINS(child.output, "größe \"f16\" F16 [5, 3]");
    CHECK_CONTAINS(child.output, "strided F32 [4, 3]");
    CHECK_CONTAINS(child.output, "number F64 [] ");
    free(child.output);
    td_state_destroy(state);
}

TEST(bools_are_0_and_1_in_a_file)
{
    uint8_t odd[] = {0, 2, 255, 1};
    td_state *state = td_state_create();
    td_tensor *tensor = td_from_blob(odd, SHAPE(4), NULL, TD_BOOL, NULL, NULL, NULL);
    CHECK_OK(td_state_add(state, "odd", tensor));
    const char *path = temp_path("a.safetensors");
    CHECK_OK(td_save_safetensors(path, state, NULL, 0));
    td_state *back = td_load_safetensors(path, NULL);
    CHECK_TENSOR(back, "odd", TD_BOOL, uint8_t, 0, 1, 1, 1);
    td_state_destroy(back);
    td_state_destroy(state);
    td_tensor_release(tensor);
}

TEST(refuses_what_the_format_lacks)
{
    const char *path = temp_path("a.safetensors");
    td_state *state = td_state_create();
    td_tensor *x = td_zeros(SHAPE(2), TD_COMPLEX128, NULL), *y = td_zeros(SHAPE(2), TD_F32, NULL);
    CHECK_OK(td_state_add(state, "z", x));
    CHECK_FAILS(td_save_safetensors(path, state, NULL, 0), TD_ERR_UNSUPPORTED, "complex128");
    td_state_destroy(state);
    state = td_state_create();
    CHECK_OK(td_state_add(state, "__metadata__", y));
    CHECK_FAILS(td_save_safetensors(path, state, NULL, 0), TD_ERR_INVALID, "__metadata__");
    td_state_destroy(state);
    state = td_state_create();
    CHECK_OK(td_state_add(state, "bad\xff", y));
    CHECK_FAILS(td_save_safetensors(path, state, NULL, 0), TD_ERR_INVALID, "UTF-8");
    td_state_destroy(state);
    state = td_state_create();
    td_file_note own = {"tandem.x", ""}, none = {"a", NULL}, twice[] = {{"a", ""}, {"a", ""}};
    CHECK_FAILS(td_save_safetensors(path, state, &own, 1), TD_ERR_INVALID, "tandem.x");
    CHECK_FAILS(td_save_safetensors(path, state, &none, 1), TD_ERR_INVALID, "note 0");
    CHECK_FAILS(td_save_safetensors(path, state, twice, 2), TD_ERR_INVALID, "\"a\"");
    CHECK_FAILS(td_save_safetensors(path, state, NULL, 1), TD_ERR_INVALID, "notes");
    CHECK_FAILS(td_save_safetensors(NULL, state, NULL, 0), TD_ERR_INVALID, "path");
    CHECK_FAILS(td_save_safetensors(path, NULL, NULL, 0), TD_ERR_INVALID, "state");
    CHECK_FAILS(td_save_safetensors("", state, NULL, 0), TD_ERR_INVALID, "no name of a file");
    CHECK(!td_load_safetensors(NULL, NULL));
    CHECK_FAILS(td_read_safetensors_notes(path, NULL, NULL), TD_ERR_INVALID, "function");
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 0);
    td_state_destroy(state);
    td_tensor_release(x);
    td_tensor_release(y);
}

/* ---- Hostile and damaged files -------------------------------------------------------------------- */

static void check_refused(const void *header, size_t size, uint64_t claimed, size_t data_size,
                          const char *part)
{
    static char file[1 << 16];
    const char *path = temp_path("bad.safetensors");
    memcpy(file, &claimed, 8);
    memcpy(file + 8, header, size);
    memset(file + 8 + size, 7, data_size);
    write_file(path, file, 8 + size + data_size);
    if (td_load_safetensors(path, NULL))
        FAIL("%.*s was read", (int)size, (const char *)header);
    CHECK_CONTAINS(td_last_error(), "bad.safetensors");
    CHECK_CONTAINS(td_last_error(), part);
}

static void check_header(const char *header, size_t data_size, const char *part)
{
    check_refused(header, strlen(header), strlen(header), data_size, part);
}

#define ENTRY(name, rest) "{\"" name "\":{\"dtype\":\"F32\"," rest "}}"

TEST(refuses_wrong_lengths)
{
    write_file(temp_path("bad.safetensors"), "1234567", 7);
    CHECK(!td_load_safetensors(temp_path("bad.safetensors"), NULL));
    CHECK_CONTAINS(td_last_error(), "7 bytes");
    check_refused("{}", 2, 3, 0, "header of 3 bytes");
    check_refused("{}", 2, UINT64_MAX, 0, "18446744073709551615");
    check_refused("{}", 2, (uint64_t)1 << 63, 0, "header of");
    check_refused("", 0, 0, 0, "at byte 8");
    check_header("{}", 1, "1");
}

TEST(refuses_wrong_offsets)
{
    check_header(ENTRY("x", "\"shape\":[1],\"data_offsets\":[0,4]"), 3, "\"x\"");
    check_header(ENTRY("x", "\"shape\":[1],\"data_offsets\":[0,4]"), 5, "4 bytes");
    check_header(ENTRY("x", "\"shape\":[1],\"data_offsets\":[4,0]"), 4, "from 4 to 0");
    check_header(ENTRY("x", "\"shape\":[1],\"data_offsets\":[4,8]"), 8, "a gap");
    check_header(ENTRY("x", "\"shape\":[2],\"data_offsets\":[0,4]"), 4, "needs 8");
    check_header(ENTRY("x", "\"shape\":[1],\"data_offsets\":[0,9223372036854775807]"), 4, "\"x\"");
    check_header(ENTRY("x", "\"shape\":[1],\"data_offsets\":[0,9223372036854775808]"), 4, "2^63");
    check_header(ENTRY("x", "\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]"), 0,
                 "too large");
    check_header(ENTRY("x", "\"shape\":[4294967296,4294967296,0],\"data_offsets\":[0,0]"), 0,
                 "too large");
    check_header(ENTRY("x", "\"shape\":[1],\"data_offsets\":[0,4,8]"), 8, "byte");
    check_header(ENTRY("x", "\"shape\":[1],\"data_offsets\":[4]"), 8, "byte");
    check_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                 "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
                 8, "another tensor is");
    check_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                 "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
                 4, "another tensor is");
}

TEST(refuses_wrong_entries)
{
    check_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                 "\"\\u0061\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
                 8, "two tensors of the name \"a\"");
    check_header(ENTRY("", "\"shape\":[1],\"data_offsets\":[0,4]"), 4, "empty name");
    check_header(ENTRY("x", "\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]"), 4,
                 "second time");
    check_header(ENTRY("x", "\"shape\":[1]"), 4, "lacks");
    check_header(ENTRY("x", "\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]"), 4,
                 "more dimensions");
    static const char *const sizes[] = {"-1",    "NaN",  "1.0", "1e0", "01",
                                        "\"1\"", "null", "[1]", ""};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char text[256];
        snprintf(text, sizeof text, ENTRY("x", "\"shape\":[1,%s],\"data_offsets\":[0,4]"),
                 sizes[i]);
        check_header(text, 4, "at byte");
    }
    check_header("{\"x\":{\"dtype\":\"F8_E4M3\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
                 "F8_E4M3");
    check_header("{\"x\":{\"dtype\":\"C128\",\"shape\":[1],\"data_offsets\":[0,16]}}", 16, "C128");
    check_header("{\"x\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "string");
    check_header("{\"x\":[]}", 0, "an object must begin");
    check_header("{\"__metadata__\":{\"a\":1}}", 0, "string");
    check_header("{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", 0, "\"a\" twice");
    check_header("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "second time");
}

TEST(refuses_what_is_no_json)
{
    static const char *const texts[] = {
        "[]",
        " {}",
        "{",
        "{}x",
        "{} {}",
        "{\"a\"}",
        "{\"a\":}",
        "{,}",
        "{\"a\":{},}",
        "nul",
        "{'a':{}}",
        "{\"\\x\":{}}",
        "{\"\\ud800\":{}}",
        "{\"\\udc00\":{}}",
        "{\"\\ud800\\u0041\":{}}",
        "{\"\\u00\":{}}",
        "{\"\\u0000\":{}}",
        "{\"\xff\":{}}",
        "{\"\xc0\x80\":{}}",
        "{\"\xed\xa0\x80\":{}}",
        "{\"a\nb\":{}}",
        "{\"abc",
        "{\"abc\\",
        "\xef\xbb\xbf{}",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        check_header(texts[i], 0, "at byte");
    static char deep[4000];
    int used = snprintf(deep, sizeof deep, "{\"x\":{\"y\":");
    memset(deep + used, '[', 3000);
    check_header(deep, 0, "too deep");
}

TEST(a_damaged_file_is_told_from_a_whole_one)
{
    static char file[1 << 16];
    const char *path = temp_path("a.safetensors"), *bad = temp_path("bad.safetensors");
    td_state *state = make_state();
    CHECK_OK(td_save_safetensors(path, state, NULL, 0));
    size_t size = read_file(path, file, sizeof file);
    write_file(bad, file, size);
    int fd = open(bad, O_WRONLY);
    for (size_t i = 0; i < size; i++) {
        char changed = file[i] ^ 1;
        CHECK_EQ(pwrite(fd, &changed, 1, (off_t)i), 1);
        if (td_load_safetensors(bad, NULL))
            FAIL("a change of byte %zu of %zu was not noticed", i, size);
        CHECK_EQ(pwrite(fd, &file[i], 1, (off_t)i), 1);
    }
    close(fd);
    file[size - 1] ^= 4;
    write_file(bad, file, size);
    CHECK(!td_load_safetensors(bad, NULL));
    CHECK_CONTAINS(td_last_error(), "is damaged: the SHA-256");
    file[size - 1] ^= 4;
    for (size_t i = 0; i < size; i += 1 + i / 16) {
        write_file(bad, file, i);
        if (td_load_safetensors(bad, NULL))
            FAIL("a file cut at byte %zu of %zu was read", i, size);
    }
    write_file(bad, file, size);
    td_state *back = td_load_safetensors(bad, NULL);
    CHECK(back != NULL);
    td_state_destroy(back);
    td_state_destroy(state);
}

TEST(a_later_version_is_refused_by_name)
{
    const char *path = temp_path("bad.safetensors");
    check_header(
        "{\"__metadata__\":{\"tandem.version\":\"2\"},\"x\":{\"dtype\":\"F4\",\"shape\":[],"
        "\"data_offsets\":[0,1]}}",
        1, "tandem.version is 2");
    CHECK_CONTAINS(td_last_error(), td_version());
    CHECK_FAILS(td_read_safetensors_notes(path, join_note, NULL), TD_ERR_UNSUPPORTED,
                "later version of Tandem");
    check_header("{\"__metadata__\":{\"tandem.version\":\"1\"}}", 0, "no checksum");
    check_header("{\"__metadata__\":{\"tandem.version\":\"1\",\"tandem.sha256\":\"12\"}}", 0,
                 "no checksum");
    check_header("{\"__metadata__\":{\"tandem.version\":\"x\"}}", 0, "tandem.version");
}

/* ---- What the system refuses ---------------------------------------------------------------------- */

TEST(a_path_that_cannot_be_written_is_named)
{
    td_state *state = make_state();
    const char *inside = temp_path("missing/a.safetensors");
    CHECK_FAILS(td_save_safetensors(inside, state, NULL, 0), TD_ERR_SYSTEM, inside);
    CHECK_CONTAINS(td_last_error(), "No such file or directory");
    CHECK_FAILS(td_save_safetensors(td_test_temp_dir(), state, NULL, 0), TD_ERR_SYSTEM,
                "a directory");
    CHECK_FAILS(td_save_safetensors("/dev/null", state, NULL, 0), TD_ERR_SYSTEM, "/dev/null");
    struct stat there;
    CHECK(!stat("/dev/null", &there) && S_ISCHR(there.st_mode));
    CHECK(!td_load_safetensors(inside, NULL));
    CHECK_CONTAINS(td_last_error(), inside);
    CHECK(!td_load_safetensors(td_test_temp_dir(), NULL));
    CHECK_CONTAINS(td_last_error(), "a directory");
    CHECK(!td_load_safetensors("/dev/zero", NULL));
    td_state_destroy(state);
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 0);
}

static void save_as_another_user(void *arg)
{
    const char *path = arg, *theirs = temp_path("open/theirs");
    td_state *state = make_state();
    CHECK(!setgid(65534) && !setuid(65534));
    CHECK_FAILS(td_save_safetensors(path, state, NULL, 0), TD_ERR_SYSTEM, path);
    CHECK_CONTAINS(td_last_error(), "Permission denied");
    CHECK_FAILS(td_save_safetensors(theirs, state, NULL, 0), TD_ERR_SYSTEM, theirs);
    CHECK_CONTAINS(td_last_error(), "Permission denied");
    CHECK_OK(td_save_safetensors(temp_path("open/mine"), state, NULL, 0));
    td_state_destroy(state);
}

TEST(without_permission_nothing_changes)
{
    if (geteuid() != 0)
        td_test_skip("only root can become another user");
    CHECK(!chmod(td_test_temp_dir(), 0755));
    CHECK(!mkdir(temp_path("open"), 0777) && !chmod(temp_path("open"), 0777));
    write_file(temp_path("open/theirs"), "abc", 3);
    struct td_test_child child = td_test_fork(save_as_another_user,
                                              (void *)temp_path("a.safetensors"));
    if (child.status)
        FAIL("%s", child.output);
    free(child.output);
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 1);
    CHECK_EQ(td_test_count_files(temp_path("open")), 2);
    char content[8];
    CHECK_EQ(read_file(temp_path("open/theirs"), content, sizeof content), 3);
}

/* Saves something small, then something large that finds no room, and compares. */
static void fill_up(const char *directory, const char *reason)
{
    char path[512];
    snprintf(path, sizeof path, "%s/a.safetensors", directory);
    td_state *state = make_state(), *large = td_state_create();
    CHECK_OK(td_save_safetensors(path, state, NULL, 0));
    static float room[1 << 20];
    td_tensor *x = td_from_blob(room, SHAPE(1 << 20), NULL, TD_F32, NULL, NULL, NULL);
    CHECK_OK(td_state_add(large, "x", x));
    CHECK_FAILS(td_save_safetensors(path, large, NULL, 0), TD_ERR_SYSTEM, path);
    CHECK_CONTAINS(td_last_error(), reason);
    CHECK_EQ(td_test_count_files(directory), 1);
    td_state *back = td_load_safetensors(path, NULL);
    CHECK(back != NULL);
    check_equal(state, back);
    td_state_destroy(back);
    td_state_destroy(large);
    td_state_destroy(state);
    td_tensor_release(x);
}

static void fill_small_disk(void *arg)
{
    const char *directory = arg;
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("small", directory, "tmpfs", 0, "size=256k"))
        _exit(77);
    fill_up(directory, "No space left on device");
}

TEST(a_full_disk_leaves_the_former_file)
{
    struct td_test_child child = td_test_fork(fill_small_disk, (void *)td_test_temp_dir());
    if (WIFEXITED(child.status) && WEXITSTATUS(child.status) == 77)
        td_test_skip("no file system can be mounted here");
    if (child.status)
        FAIL("%s", child.output);
    free(child.output);
}

TEST(a_limit_of_sizes_leaves_the_former_file)
{
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    CHECK(!getrlimit(RLIMIT_FSIZE, &limit));
    limit.rlim_cur = 1 << 21;
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
    fill_up(td_test_temp_dir(), "File too large");
}

/* ---- Modules -------------------------------------------------------------------------------------- */

static td_module *make_net(uint64_t seed)
{
    td_manual_seed(seed);
    return td_sequential(td_linear(4, 6), td_batch_norm1d(6), td_relu(), td_linear(6, 2), NULL);
}

static void check_same_module(td_module *a, td_module *b)
{
    td_state *x = td_module_state(a), *y = td_module_state(b);
    CHECK_EQ(td_state_count(x), td_state_count(y));
    for (int i = 0; i < td_state_count(x); i++)
        CHECK_MEM(td_tensor_data(td_state_tensor(x, i)), td_tensor_data(td_state_tensor(y, i)),
                  td_tensor_nbytes(td_state_tensor(x, i)));
    td_state_destroy(x);
    td_state_destroy(y);
}

TEST(a_module_comes_back)
{
    const char *path = temp_path("net.safetensors");
    td_module *a = make_net(1), *b = make_net(2), *c = td_linear(4, 6);
    CHECK_OK(td_save_module(path, a));
    CHECK_OK(td_load_module(path, b, NULL));
    check_same_module(a, b);
    CHECK_FAILS(td_load_module(path, c, NULL), TD_ERR_INVALID, path);
    CHECK_CONTAINS(td_last_error(), "0.weight");
    CHECK_FAILS(td_load_module(temp_path("none"), b, NULL), TD_ERR_SYSTEM, "No such file");
    CHECK_FAILS(td_load_module(NULL, b, NULL), TD_ERR_INVALID, "path");
    CHECK_FAILS(td_save_module(path, NULL), TD_ERR_INVALID, "module");

    td_module *far = make_net(3);
    CHECK_OK(td_module_to(far, td_device_get("cpu:1")));
    CHECK_OK(td_load_module(path, far, NULL));
    check_same_module(a, far);
    td_state *state = td_module_state(far);
    CHECK_STR(td_device_name(td_tensor_device(td_state_tensor(state, 0))), "cpu:1");
    td_state_destroy(state);
    td_module_destroy(far);
    td_module_destroy(a);
    td_module_destroy(b);
    td_module_destroy(c);
}

TEST(wrapped_and_plain_modules_read_the_same_files)
{
    CHECK_OK(td_init_process_group(NULL));
    const char *plain_path = temp_path("plain"), *wrapped_path = temp_path("wrapped");
    td_module *plain = make_net(1), *wrapped = td_ddp(make_net(2), NULL);
    CHECK(wrapped != NULL);
    CHECK_OK(td_save_module(plain_path, plain));
    CHECK_OK(td_save_module(wrapped_path, wrapped));
    td_module *other = make_net(3);
    CHECK_OK(td_load_module(wrapped_path, other, NULL));
    check_same_module(wrapped, other);
    CHECK_OK(td_load_module(plain_path, wrapped, NULL));
    check_same_module(plain, wrapped);
    td_module_destroy(other);
    td_module_destroy(wrapped);
    td_module_destroy(plain);
    CHECK_OK(td_destroy_process_group());
}
