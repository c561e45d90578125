/* Where the files of plug-ins are looked for, and which are refused. */
#include "group/process_group.h"
#include "plugin/plugins.h"
#include "runner.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define BUILT(sample) TD_TEST_BUILD_DIR "/tests/plugins/" sample "/tandem_" sample ".so"

static char paths[4][512];

/* "<temporary folder>/<name>", in one of four buffers. */
static const char *in_temp(const char *name)
{
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof *paths, "%s/%s", td_test_temp_dir(), name);
    return path;
}

static void make_folder(const char *path)
{
    CHECK_EQ(mkdir(path, 0755), 0);
}

static void write_file(const char *path, const void *data, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0755);
    CHECK(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    close(fd);
}

static void copy_file(const char *from, const char *to)
{
    struct stat info;
    int fd = open(from, O_RDONLY);
    CHECK(fd >= 0 && !fstat(fd, &info));
    char *data = malloc((size_t)info.st_size);
    CHECK(data && read(fd, data, (size_t)info.st_size) == info.st_size);
    close(fd);
    write_file(to, data, (size_t)info.st_size);
    free(data);
}

static bool is_found(const char *name)
{
    bool found;
    CHECK_OK(td__plugin_find(name, &found));
    return found;
}

/* The path of a plug-in in the list; "" where it is not there. */
static const char *path_of(const char *name)
{
    static char path[4096];
    td_plugin_info *list;
    int count;
    CHECK_OK(td_list_plugins(false, &list, &count));
    path[0] = '\0';
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, name))
            snprintf(path, sizeof path, "%s", list[i].path);
    td_free_plugin_list(list);
    return path;
}

/* ---- The search path ----------------------------------------------------------------------------- */

TEST(first_found_wins)
{
    char list[2048];
    make_folder(in_temp("a"));
    make_folder(in_temp("b"));
    copy_file(BUILT("good"), in_temp("b/tandem_good.so"));
    snprintf(list, sizeof list, "::/no/such/folder:%s:%s:%s/:%s", in_temp("a"), in_temp("b"),
             BUILT("good"), TD_TEST_BUILD_DIR "/tests/plugins/good");
    setenv("TANDEM_PLUGIN_PATH", list, 1);
    CHECK_CONTAINS(path_of("good"), "/b/tandem_good.so");
    write_file(in_temp("a/tandem_good.so"), "not a library", 13);
    td_load_plugin("nothing"); /* forgets what was found */
    CHECK_CONTAINS(path_of("good"), "/a/tandem_good.so");
    CHECK_FAILS(td_load_plugin("good"), TD_ERR_SYSTEM, "a/tandem_good.so cannot be loaded");
}

TEST(a_file_in_the_search_path)
{
    setenv("TANDEM_PLUGIN_PATH", BUILT("good"), 1);
    CHECK(is_found("good"));
    CHECK(!is_found("slow"));
}

TEST(a_negative_result_is_remembered)
{
    setenv("TANDEM_PLUGIN_PATH", in_temp("x"), 1);
    CHECK(!is_found("good"));
    make_folder(in_temp("x"));
    copy_file(BUILT("good"), in_temp("x/tandem_good.so"));
    CHECK(!is_found("good"));
    CHECK_FAILS(td_load_plugin("nothing"), TD_ERR_INVALID,
                "td_load_plugin: there is no plug-in tandem_nothing.so in ");
    CHECK_CONTAINS(td_last_error(), in_temp("x"));
    CHECK(is_found("good"));
}

TEST(another_search_path_is_noticed)
{
    unsetenv("TANDEM_PLUGIN_PATH");
    CHECK(!is_found("good"));
    setenv("TANDEM_PLUGIN_PATH", TD_TEST_BUILD_DIR "/tests/plugins/good", 1);
    CHECK(is_found("good"));
    unsetenv("TANDEM_PLUGIN_PATH");
    CHECK(is_found("good")); /* it is loaded */
}

TEST(the_library_has_a_folder)
{
    char text[1024];
    td__plugin_places(NULL, text, sizeof text);
    CHECK_CONTAINS(text, TD_TEST_BUILD_DIR "/lib/tandem/plugins");
}

/* ---- Names ------------------------------------------------------------------------------------------ */

TEST(odd_names_are_no_file_names)
{
    static const char *const odd[] = {
        "",     "../good",  "a/b",    "a b",
        "a.so", "\xc3\xa4", "good\n", "a-name-that-is-far-too-long-for-one"};
    setenv("TANDEM_PLUGIN_PATH", TD_TEST_BUILD_DIR "/tests/plugins/good", 1);
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        CHECK(!is_found(odd[i]));
        CHECK_FAILS(td_load_plugin(odd[i]), TD_ERR_INVALID, "td_load_plugin: ");
    }
    CHECK_FAILS(td_load_plugin("/no/such/tandem_x.so"), TD_ERR_INVALID, "No such file");
    CHECK_FAILS(td_load_plugin("/usr/bin/env"), TD_ERR_INVALID, "its name must be tandem_NAME.so");
    CHECK_FAILS(td_load_plugin(NULL), TD_ERR_INVALID, "NULL");
    struct td__backend_found found;
    CHECK(td__backend_find("../good", &found));
    CHECK(!strstr(td_last_error(), "tandem_"));
    CHECK(td__backend_find("absent", &found));
    CHECK_CONTAINS(td_last_error(), "there is no plug-in tandem_absent.so in " TD_TEST_BUILD_DIR);
}

TEST(names_of_files)
{
    char name[TD__PLUGIN_NAME];
    CHECK(td__plugin_name_of("/x/tandem_a-b_1.so", name));
    CHECK_STR(name, "a-b_1");
    CHECK(td__plugin_name_of("tandem_cuda.so.1.2", name));
    CHECK_STR(name, "cuda");
    CHECK(!td__plugin_name_of("/tandem_x.so/other", name));
    CHECK(!td__plugin_name_of("tandem_x.sour", name));
    CHECK(!td__plugin_name_of("tandem_.so", name));
    CHECK(!td__plugin_name_of("libtandem_x.so", name));
}

TEST(links)
{
    copy_file(BUILT("good"), in_temp("tandem_good.so.1"));
    CHECK_EQ(symlink("tandem_good.so.1", in_temp("tandem_good.so")), 0);
    CHECK_EQ(symlink("tandem_good.so", in_temp("tandem_alias.so")), 0);
    setenv("TANDEM_PLUGIN_PATH", td_test_temp_dir(), 1);
    CHECK(is_found("alias"));
    CHECK(is_found("good"));
    struct td__backend_found found;
    CHECK_OK(td__backend_find("good", &found));
    CHECK(td__backend_find("alias", &found));
    CHECK_CONTAINS(td_last_error(), "tandem_good.so.1 does not register it");
    CHECK_FAILS(td_load_plugin(BUILT("good")), TD_ERR_STATE, "is loaded already, from ");
}

/* ---- Files that cannot be trusted --------------------------------------------------------------------- */

static void prepare(const char *folder, const char *file)
{
    make_folder(in_temp(folder));
    copy_file(BUILT("good"), in_temp(file));
}

TEST(a_file_that_others_can_write)
{
    prepare("p", "p/tandem_good.so");
    CHECK_EQ(chmod(in_temp("p/tandem_good.so"), 0757), 0);
    CHECK_FAILS(td_load_plugin(in_temp("p/tandem_good.so")), TD_ERR_AUTH,
                "the file can be written by everybody");
    CHECK_EQ(chmod(in_temp("p/tandem_good.so"), 0775), 0);
    CHECK_OK(td_load_plugin(in_temp("p/tandem_good.so")));
}

TEST(a_folder_that_others_can_write)
{
    make_folder(in_temp("q"));
    prepare("q/r", "q/r/tandem_good.so");
    CHECK_EQ(chmod(in_temp("q"), 0777), 0);
    CHECK_FAILS(td_load_plugin(in_temp("q/r/tandem_good.so")), TD_ERR_AUTH,
                "/q can be written by everybody");
    CHECK_EQ(chmod(in_temp("q"), 01777), 0); /* as /tmp */
    CHECK_OK(td_load_plugin(in_temp("q/r/tandem_good.so")));
}

TEST(a_file_of_another_user)
{
    if (geteuid() != 0)
        td_test_skip("only root can give files away");
    prepare("s", "s/tandem_good.so");
    CHECK_EQ(chown(in_temp("s/tandem_good.so"), 12345, (gid_t)-1), 0);
    CHECK_FAILS(td_load_plugin(in_temp("s/tandem_good.so")), TD_ERR_AUTH,
                "the file belongs to user 12345");
    CHECK_EQ(chown(in_temp("s/tandem_good.so"), 0, (gid_t)-1), 0);
    CHECK_EQ(chown(in_temp("s"), 12345, (gid_t)-1), 0);
    setenv("TANDEM_PLUGIN_PATH", in_temp("s"), 1);
    struct td__backend_found found;
    CHECK(td__backend_find("good", &found));
    CHECK_EQ(td_last_status(), TD_ERR_AUTH);
    CHECK_CONTAINS(td_last_error(), "its folder belongs to user 12345");
}

static void become_somebody(void *program)
{
    CHECK(!setgid(12345) && !setuid(12345));
    execl(program, program, "good", NULL);
    _exit(127);
}

/* A program with more rights than its user must not run what that user wants. */
TEST(set_user_id_programs_ignore_the_variable)
{
    struct statvfs system;
    const char *program = in_temp("host");
    CHECK_EQ(statvfs(td_test_temp_dir(), &system), 0);
    if (geteuid() != 0 || (system.f_flag & ST_NOSUID) || td_test_slowness() > 1)
        td_test_skip("needs root, a file system with set-user-ID programs, and no sanitizer");
    CHECK_EQ(chmod(td_test_temp_dir(), 0711), 0);
    prepare("v", "v/tandem_good.so");
    copy_file(TD_TEST_BUILD_DIR "/tests/plugin_hidden", program);
    setenv("TANDEM_PLUGIN_PATH", in_temp("v"), 1);
    struct td_test_child child = td_test_fork(become_somebody, (void *)program);
    CHECK_CONTAINS(child.output, "/v/tandem_good.so cannot be loaded");
    free(child.output);
    CHECK_EQ(chmod(program, 04755), 0);
    child = td_test_fork(become_somebody, (void *)program);
    CHECK_CONTAINS(child.output, "there is no plug-in tandem_good.so in ");
    CHECK(!strstr(child.output, in_temp("v")));
    free(child.output);
}

TEST(not_a_file)
{
    make_folder(in_temp("tandem_good.so"));
    CHECK_FAILS(td_load_plugin(in_temp("tandem_good.so")), TD_ERR_INVALID, "not a regular file");
}
