/* The library is loaded by programs that were not linked with it, also while they have threads. */
#include "runner.h"

#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* What each thread of a program has of the library's own. A text or a buffer that does not fit is allocated,
 * or is its caller's. */
enum { MOST_THREAD_LOCAL = 4608 };

static void host_runs(const char *what)
{
    struct td_test_child child = td_test_exec(
        (const char *[]){TD_TEST_BUILD_DIR "/tests/dlopen_host", TD_TEST_LIBRARY, what, NULL});
    if (child.status)
        FAIL("dlopen_host %s: wait status %d: %s", what, child.status, child.output);
    free(child.output);
}

TEST(a_program_loads_it)
{
    host_runs("calls");
}

TEST(a_program_loads_it_again_and_again)
{
    host_runs("again");
}

TEST(a_program_with_threads_loads_it)
{
    host_runs("threads");
}

static const char script[] =
    "import ctypes, sys, threading\n"
    "lib = ctypes.CDLL(sys.argv[1])\n"
    "lib.td_version.restype = lib.td_last_error.restype = ctypes.c_char_p\n"
    "def use():\n"
    "    store = ctypes.c_void_p()\n"
    "    assert lib.td_hash_store_open(ctypes.byref(store)) == 0\n"
    "    assert lib.td_store_set(store, b'k', b'v', ctypes.c_size_t(1)) == 0\n"
    "    assert lib.td_store_close(store) == 0\n"
    "    assert lib.td_hash_store_open(None) != 0 and lib.td_last_error()\n"
    "    done.append(1)\n"
    "done = []\n"
    "threads = [threading.Thread(target=use) for _ in range(8)]\n"
    "[t.start() for t in threads]; [t.join() for t in threads]\n"
    "assert len(done) == 8\n"
    "print('version', lib.td_version().decode())\n";

TEST(python_loads_it)
{
    if (td_test_slowness() > 1)
        td_test_skip("a sanitizer's library needs a program that has the sanitizer, too");
    struct td_test_child child = td_test_exec(
        (const char *[]){"python3", "-c", script, TD_TEST_LIBRARY, NULL});
    if (!WIFEXITED(child.status) || WEXITSTATUS(child.status) == 127 ||
        strstr(child.output, "No module named"))
        td_test_skip("there is no python3 with ctypes: %s", child.output);
    CHECK_CONTAINS(child.output, "version ");
    CHECK_EQ(child.status, 0);
    free(child.output);
}

/* An object whose thread locals are of the initial-exec model, one of them at least, has the flag, and then
 * all of them have to fit what little the program has left over. */
TEST(its_thread_locals_are_few_and_found_when_they_are_used)
{
    struct stat info;
    int fd = open(TD_TEST_LIBRARY, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && !fstat(fd, &info));
    const char *file = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(file != MAP_FAILED);
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)file;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_ident[EI_CLASS] != ELFCLASS64)
        td_test_skip("the library is no ELF file of 64 bits");
    const Elf64_Phdr *segments = (const Elf64_Phdr *)(file + header->e_phoff);
    bool dynamic = false;
    for (int i = 0; i < header->e_phnum; i++) {
        if (segments[i].p_type == PT_TLS && segments[i].p_memsz > MOST_THREAD_LOCAL)
            FAIL("%zu bytes are thread local; the most is %d", (size_t)segments[i].p_memsz,
                 MOST_THREAD_LOCAL);
        if (segments[i].p_type != PT_DYNAMIC)
            continue;
        dynamic = true;
        const Elf64_Dyn *entry = (const Elf64_Dyn *)(file + segments[i].p_offset);
        for (; entry->d_tag != DT_NULL; entry++)
            if (entry->d_tag == DT_FLAGS)
                CHECK(!(entry->d_un.d_val & DF_STATIC_TLS));
    }
    CHECK(dynamic);
    munmap((void *)file, (size_t)info.st_size);
    close(fd);
}
