/* Shareable memory: the allocator, the view from another process, and fork(). */
#include "runner.h"

#include "base/arena.h"
#include "base/clock.h"
#include "os/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static struct td__arena *make_arena(size_t reserve)
{
    struct td__arena *arena = NULL;
    CHECK_OK(td__arena_create(reserve, &arena));
    return arena;
}

/* ---- Allocating ------------------------------------------------------------------------------ */

TEST(arena_allocates_aligned_and_zeroed)
{
    static const char zeros[5000];
    for (size_t size = 1; size < sizeof zeros; size = size * 3 + 1) {
        void *memory = td_alloc(size);
        CHECK(memory != NULL);
        CHECK_EQ((uintptr_t)memory % 64, 0);
        CHECK_MEM(memory, zeros, size);
        memset(memory, 0xaa, size);
    }
    CHECK(td_alloc(0) == NULL);
    CHECK(td_last_error()[0] != '\0');
    CHECK(td_alloc(SIZE_MAX) == NULL);
    CHECK_CONTAINS(td_last_error(), "18446744073709551615");
    CHECK(td_alloc(SIZE_MAX - 100) == NULL); /* must not wrap round to something small */
    CHECK(td_alloc(SIZE_MAX / 2) == NULL);
    td_free(NULL);
}

/* A block with a pattern in all of it, so that two that overlap are noticed. */
struct piece {
    unsigned char *memory;
    size_t size;
    unsigned char mark;
};

static void fill(struct piece *piece)
{
    memset(piece->memory, piece->mark, piece->size);
}

static void check_filled(const struct piece *piece)
{
    for (size_t i = 0; i < piece->size; i++)
        if (piece->memory[i] != piece->mark)
            FAIL("byte %zu of a block of %zu was changed from %d to %d", i, piece->size,
                 piece->mark, piece->memory[i]);
}

static size_t random_size(uint32_t *state)
{
    uint32_t kind = next_random(state) % 100;
    if (kind < 60)
        return 1 + next_random(state) % 2000;
    if (kind < 95)
        return 1 + next_random(state) % 40000;
    return 1 + next_random(state) % 1000000;
}

TEST(arena_against_a_model)
{
    enum { PIECES = 150 };
    struct td__arena *arena = make_arena(256 * MIB);
    static struct piece pieces[PIECES];
    uint32_t state = 7;
    for (int step = 0; step < 8000; step++) {
        struct piece *piece = &pieces[next_random(&state) % PIECES];
        if (piece->memory) {
            check_filled(piece);
            CHECK(td__arena_free(arena, piece->memory));
            piece->memory = NULL;
            continue;
        }
        piece->size = random_size(&state);
        piece->mark = (unsigned char)next_random(&state);
        piece->memory = td__arena_alloc(arena, piece->size);
        CHECK(piece->memory != NULL);
        CHECK_EQ((uintptr_t)piece->memory % 64, 0);
        fill(piece);
    }
    for (int i = 0; i < PIECES; i++) {
        if (pieces[i].memory) {
            check_filled(&pieces[i]);
            CHECK(td__arena_free(arena, pieces[i].memory));
        }
    }
    /* All free blocks have become one again. */
    size_t size = td__arena_size(arena);
    CHECK(size > 0 && size <= 256 * MIB);
    void *whole = td__arena_alloc(arena, size);
    CHECK(whole != NULL);
    CHECK_EQ(td__arena_size(arena), size);
    CHECK(td__arena_alloc(arena, 1) != NULL); /* and now it has to grow */
    CHECK(td__arena_size(arena) > size);
    td__arena_destroy(arena);
}

TEST(arena_fills_up_to_its_reserve)
{
    struct td__arena *arena = make_arena(3 * MIB + 1); /* rounded up to a page */
    void *blocks[8192];
    int count = 0;
    while ((blocks[count] = td__arena_alloc(arena, 1000)))
        count++;
    CHECK_CONTAINS(td_last_error(), "no room for 1000 more bytes");
    CHECK(count > 2500);
    CHECK(td__arena_alloc(arena, 4 * MIB) == NULL);
    CHECK_EQ(td__arena_size(arena), 3 * MIB + td__page_size());
    for (int i = 0; i < count; i += 2) /* first every other one, so that nothing can merge */
        CHECK(td__arena_free(arena, blocks[i]));
    CHECK(td__arena_alloc(arena, 2000) == NULL);
    void *again = td__arena_alloc(arena, 1000);
    CHECK(again != NULL);
    CHECK(td__arena_free(arena, again));
    for (int i = 1; i < count; i += 2)
        CHECK(td__arena_free(arena, blocks[i]));
    void *whole = td__arena_alloc(arena, 3 * MIB + td__page_size());
    CHECK(whole != NULL);
    CHECK(td__arena_alloc(arena, 1) == NULL);
    td__arena_destroy(arena);
}

TEST(arena_takes_the_hole_that_fits_best)
{
    struct td__arena *arena = make_arena(64 * MIB);
    static const size_t sizes[] = {5, 1, 3, 1,
                                   4, 1, 3, 1}; /* MiB; those of 1 stay between the holes */
    char *blocks[8];
    for (int i = 0; i < 8; i++)
        blocks[i] = td__arena_alloc(arena, sizes[i] * MIB);
    for (int i = 0; i < 8; i += 2)
        CHECK(td__arena_free(arena, blocks[i]));
    CHECK(td__arena_alloc(arena, 3 * MIB) == blocks[2]); /* of equal ones the first in memory */
    CHECK(td__arena_alloc(arena, 2 * MIB) == blocks[6]);
    CHECK(td__arena_alloc(arena, 4 * MIB) == blocks[4]);
    CHECK(td__arena_alloc(arena, 5 * MIB) == blocks[0]);
    td__arena_destroy(arena);
}

TEST(arena_gives_large_memory_back)
{
    enum { BLOCKS = 5 };
    struct td__arena *arena = make_arena(1024 * MIB);
    unsigned char *blocks[BLOCKS];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            blocks[i] = td__arena_alloc(arena, 128 * MIB);
            CHECK(blocks[i] != NULL);
            for (size_t at = 0; at < 128 * MIB; at += MIB)
                blocks[i][at] = (unsigned char)(i + 1);
        }
        for (int i = 0; i < BLOCKS; i++)
            for (size_t at = 0; at < 128 * MIB; at += MIB)
                CHECK_EQ(blocks[i][at], i + 1);
        for (int i = 0; i < BLOCKS; i++)
            CHECK(td__arena_free(arena, blocks[i]));
    }
    struct stat info;
    CHECK_EQ(fstat(td__arena_fd(arena), &info), 0);
    CHECK(info.st_blocks * 512 <
          (off_t)(BLOCKS * 128 * 4096)); /* pages were returned to the system */
    td__arena_destroy(arena);
}

static size_t pages_of(struct td__arena *arena)
{
    struct stat info;
    CHECK_EQ(fstat(td__arena_fd(arena), &info), 0);
    return (size_t)info.st_blocks * 512;
}

TEST(arena_trims_what_is_free)
{
    static const char zeros[4096];
    struct td__arena *arena = make_arena(64 * MIB);
    struct piece pieces[5];
    for (int i = 0; i < 5; i++) {
        size_t size = 2 * MIB + (size_t)i * 1000;
        pieces[i] = (struct piece){td__arena_alloc(arena, size), size, (unsigned char)(i + 1)};
        fill(&pieces[i]);
    }
    CHECK(td__arena_free(arena, pieces[1].memory));
    CHECK(td__arena_free(arena, pieces[3].memory));
    CHECK(pages_of(arena) >= 10 * MIB); /* kept for the next allocations */
    td__arena_trim(arena);
    CHECK(pages_of(arena) <= 7 * MIB);
    for (int i = 0; i < 5; i += 2)
        check_filled(&pieces[i]);
    unsigned char *again = td__arena_alloc(arena, 2 * MIB);
    CHECK(again == pieces[1].memory);
    CHECK_MEM(again + MIB, zeros, sizeof zeros);
    td__arena_trim(arena);
    td__arena_destroy(arena);
}

TEST(arena_resolves)
{
    struct td__arena *one = make_arena(16 * MIB), *two = make_arena(16 * MIB), *found = NULL;
    char *first = td__arena_alloc(one, 5000), *second = td__arena_alloc(one, 5000);
    char *other = td__arena_alloc(two, 100);
    size_t offset = 99, base;
    CHECK(td__arena_resolve(first, &found, &base) && found == one);
    CHECK(td__arena_resolve(second, &found, &offset) && found == one);
    CHECK_EQ(offset - base, second - first);
    CHECK(td__arena_resolve(second + 4999, &found, &offset));
    CHECK_EQ(offset - base, second + 4999 - first);
    CHECK(td__arena_resolve(other, &found, &offset) && found == two);

    char on_stack[10], *from_malloc = malloc(10);
    found = NULL;
    offset = 99;
    CHECK(!td__arena_resolve(on_stack, &found, &offset));
    CHECK(!td__arena_resolve(from_malloc, &found, &offset));
    CHECK(!td__arena_resolve(NULL, &found, &offset));
    CHECK(found == NULL && offset == 99);
    free(from_malloc);

    void *shared = td_alloc(100);
    CHECK(td__arena_resolve(shared, &found, &offset));
    CHECK(found == td__arena_default());
    td__arena_destroy(two);
    CHECK(!td__arena_resolve(other, &found, &offset));
    td__arena_destroy(one);
    CHECK(!td__arena_resolve(first, &found, &offset));
    td_free(shared);
}

/* ---- Wrong pointers -------------------------------------------------------------------------- */

static void count_errors(td_log_level level, const char *line, void *arg)
{
    CHECK_EQ(level, TD_LOG_ERROR);
    CHECK_CONTAINS(line, "td_free");
    ++*(int *)arg;
}

TEST(arena_wrong_frees_are_harmless)
{
    int errors = 0, on_stack = 5;
    td_log_set_sink(count_errors, &errors);
    unsigned char *memory = td_alloc(1000), *neighbour = td_alloc(1000);
    void *foreign = malloc(100);
    memset(memory, 1, 1000);
    memset(neighbour, 2, 1000);
    td_free(NULL);
    CHECK_EQ(errors, 0);
    td_free(&on_stack);
    td_free(foreign);
    td_free((void *)64);
    td_free((void *)UINTPTR_MAX);
    td_free(memory + 64); /* inside, but not its start */
    td_free(memory + 1);
    CHECK_EQ(errors, 6);
    for (int i = 0; i < 1000; i++)
        CHECK(memory[i] == 1 && neighbour[i] == 2);
    td_free(memory);
    CHECK_EQ(errors, 6);
    td_free(memory); /* twice */
    td_free(memory);
    CHECK_EQ(errors, 8);
    void *again = td_alloc(1000), *more = td_alloc(1000);
    CHECK(again && more && again != more && again != neighbour && more != neighbour);
    for (int i = 0; i < 1000; i++)
        CHECK_EQ(neighbour[i], 2);
    td_free(again);
    td_free(more);
    td_free(neighbour);
    CHECK_EQ(errors, 8);
    free(foreign);
    td_log_set_sink(NULL, NULL);

    struct td__arena *arena = make_arena(MIB);
    memory = td__arena_alloc(arena, 10);
    CHECK(!td__arena_free(arena, memory + 512));
    CHECK(!td__arena_free(arena, &on_stack));
    CHECK(td__arena_free(arena, memory));
    CHECK(!td__arena_free(arena, memory));
    td__arena_destroy(arena);
}

/* ---- Another process ------------------------------------------------------------------------- */

static td__deadline in_a_while(void)
{
    return td__deadline_in_ms(60000);
}

/* The other process: gets the arena's fd and the place of a text, changes it, then does the same
 * with one in the part that has grown meanwhile. */
static void look_at_arena(int socket)
{
    struct td__arena_view view;
    size_t place[2]; /* offset, size */
    int fd;
    CHECK_EQ(td__recv_fd(socket, &fd, place, sizeof place, in_a_while()), 0);
    CHECK_OK(td__arena_view_open(fd, 1, &view));
    char *text = td__arena_view_at(&view, place[0], place[1]);
    CHECK(text != NULL);
    CHECK_STR(text, "from the parent");
    strcpy(text, "from the child");
    CHECK_EQ(td__send_all(socket, "x", 1, in_a_while()), 0);

    size_t first_size = view.size;
    CHECK_EQ(td__recv_all(socket, place, sizeof place, in_a_while()), 0);
    CHECK(place[0] + place[1] > first_size); /* it has grown */
    text = td__arena_view_at(&view, place[0], place[1]);
    CHECK(text != NULL);
    CHECK_STR(text + place[1] - 32, "at the far end");
    strcpy(text + place[1] - 32, "seen");

    size_t all = view.size;
    CHECK(td__arena_view_at(&view, 0, all) != NULL);
    CHECK(td__arena_view_at(&view, all - 1, 1) != NULL);
    CHECK(td__arena_view_at(&view, all, 1) == NULL);
    CHECK(td__arena_view_at(&view, all - 1, 2) == NULL);
    CHECK(td__arena_view_at(&view, all + 4096, 1) == NULL);
    CHECK(td__arena_view_at(&view, SIZE_MAX, 1) == NULL);
    CHECK(td__arena_view_at(&view, 1, SIZE_MAX) == NULL);
    CHECK(td__arena_view_at(&view, SIZE_MAX, SIZE_MAX) == NULL);
    CHECK(td__arena_view_at(&view, 0, SIZE_MAX) == NULL);
    CHECK_EQ(view.size, all);
    td__arena_view_close(&view);
    CHECK_EQ(fcntl(fd, F_GETFD), -1); /* it was the view's */
    CHECK_EQ(td__send_all(socket, "x", 1, in_a_while()), 0);
}

TEST(arena_seen_from_another_process)
{
    int pair[2];
    char reply;
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    pid_t pid = fork();
    if (pid == 0) {
        look_at_arena(pair[1]);
        _exit(0);
    }
    struct td__arena *arena = make_arena(256 * MIB);
    char *text = td__arena_alloc(arena, 100), *far;
    struct td__arena *found;
    size_t place[2] = {0, 100};
    strcpy(text, "from the parent");
    CHECK(td__arena_resolve(text, &found, &place[0]) && found == arena);
    CHECK_EQ(td__send_fd(pair[0], td__arena_fd(arena), place, sizeof place, in_a_while()), 0);
    CHECK_EQ(td__recv_all(pair[0], &reply, 1, in_a_while()), 0);
    CHECK_STR(text, "from the child");

    size_t before = td__arena_size(arena);
    place[1] = 100 * MIB;
    far = td__arena_alloc(arena, place[1]);
    CHECK(far && td__arena_size(arena) > before);
    strcpy(far + place[1] - 32, "at the far end");
    CHECK(td__arena_resolve(far, &found, &place[0]));
    CHECK_EQ(td__send_all(pair[0], place, sizeof place, in_a_while()), 0);
    CHECK_EQ(td__recv_all(pair[0], &reply, 1, in_a_while()), 0);
    CHECK_STR(far + place[1] - 32, "seen");
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    td__arena_destroy(arena);
    close(pair[0]);
    close(pair[1]);
}

TEST(arena_views_only_what_cannot_shrink)
{
    struct td__arena *arena = make_arena(MIB);
    CHECK(td__arena_alloc(arena, 100) != NULL);
    CHECK(ftruncate(td__arena_fd(arena), 0) && errno == EPERM);
    td__arena_destroy(arena);

    struct td__arena_view view = {.fd = 77};
    int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK_EQ(ftruncate(unsealed, 4096), 0);
    CHECK_FAILS(td__arena_view_open(unsealed, 1, &view), TD_ERR_INVALID, "sealed");
    CHECK(fcntl(unsealed, F_GETFD) >= 0);                   /* it is still the caller's */
    CHECK_EQ(fcntl(unsealed, F_ADD_SEALS, F_SEAL_GROW), 0); /* the wrong seal */
    CHECK_FAILS(td__arena_view_open(unsealed, 1, &view), TD_ERR_INVALID, "sealed");
    close(unsealed);
    int pipe_fds[2];
    CHECK_EQ(pipe(pipe_fds), 0);
    CHECK_FAILS(td__arena_view_open(pipe_fds[0], 1, &view), TD_ERR_INVALID, "");
    CHECK_FAILS(td__arena_view_open(-1, 1, &view), TD_ERR_INVALID, "");
    char path[512];
    snprintf(path, sizeof path, "%s/file", td_test_temp_dir());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK_FAILS(td__arena_view_open(file, 1, &view), TD_ERR_INVALID, "");
    CHECK_EQ(view.fd, 77);

    /* One that is not writable must not crash, now or at the first access. */
    int fixed = memfd_create("fixed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK_EQ(ftruncate(fixed, 4096), 0);
    CHECK_EQ(fcntl(fixed, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_WRITE), 0);
    if (!td__arena_view_open(fixed, 1, &view)) {
        CHECK(td__arena_view_at(&view, 0, 1) == NULL);
        td__arena_view_close(&view);
    } else {
        close(fixed);
    }
    close(file);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
}

TEST(arena_empty_view)
{
    struct td__arena *arena = make_arena(MIB);
    struct td__arena_view view;
    CHECK_OK(td__arena_view_open(dup(td__arena_fd(arena)), 1, &view));
    CHECK(td__arena_view_at(&view, 0, 1) == NULL); /* nothing was allocated yet */
    char *memory = td__arena_alloc(arena, 10);
    memory[0] = 'x';
    char *seen = td__arena_view_at(&view, 0, 1);
    CHECK(seen && seen != memory && *seen == 'x');
    td__arena_view_close(&view);
    td__arena_destroy(arena);
}

/* Bits 12 to 19 are what the first cache of any processor looks at beyond the place in a page of 4 KiB. */
static unsigned place_of(const void *address)
{
    return (unsigned)((uintptr_t)address / td__page_size() & 255);
}

/* Buffers at the same offset in all arenas have addresses that differ in these bits. */
TEST(arena_views_stand_apart)
{
    enum { VIEWS = 16 };
    struct td__arena *arena = td__arena_default();
    struct td__arena_view views[VIEWS];
    char *memory = td_alloc(3 * MIB);
    size_t offset;
    CHECK(td__arena_resolve(memory, &arena, &offset));
    for (unsigned i = 0; i < VIEWS; i++)
        CHECK_OK(td__arena_view_open(dup(td__arena_fd(arena)), i + 1, &views[i]));
    for (size_t at = 0; at < 3 * MIB; at += td__page_size()) {
        bool taken[256] = {false};
        taken[place_of(memory + at)] = true;
        for (int i = 0; i < VIEWS; i++) {
            char *seen = td__arena_view_at(&views[i], offset + at, 1);
            CHECK(seen && !taken[place_of(seen)]);
            taken[place_of(seen)] = true;
        }
    }
    for (int i = 0; i < VIEWS; i++)
        td__arena_view_close(&views[i]);
    td_free(memory);
}

/* ---- fork ------------------------------------------------------------------------------------ */

struct before_fork {
    char *text;
    char *in_own_arena;
    ino_t parent_inode; /* of the default arena's memfd */
};

static void live_on_in_a_fork(void *arg)
{
    struct before_fork *before = arg;
    struct td__arena *found;
    size_t offset;
    int errors = 0;
    td_log_set_sink(count_errors, &errors);
    CHECK_STR(before->text, "of the parent"); /* it keeps what the parent had */
    CHECK_STR(before->in_own_arena, "in an arena");
    strcpy(before->text, "of the child");
    strcpy(before->in_own_arena, "changed");
    CHECK(!td__arena_resolve(before->text, &found, &offset)); /* nothing to be shared from here */

    char *mine = td_alloc(1000);
    CHECK(mine && mine != before->text);
    memset(mine, 'm', 1000);
    CHECK(td__arena_resolve(mine, &found, &offset));
    CHECK(found == td__arena_default());
    struct stat ours;
    CHECK_EQ(fstat(td__arena_fd(found), &ours), 0);
    CHECK(ours.st_ino != before->parent_inode);
    CHECK_STR(before->text, "of the child");
    td_free(before->text);
    td_free(mine);
    CHECK_EQ(errors, 0);
    td_free(mine);
    CHECK_EQ(errors, 1);
    for (int i = 0; i < 100; i++)
        CHECK(td_alloc(10000) != NULL);
}

TEST(arena_after_fork)
{
    struct td__arena *arena = make_arena(MIB);
    struct before_fork before = {.text = td_alloc(100),
                                 .in_own_arena = td__arena_alloc(arena, 100)};
    struct stat info;
    CHECK_EQ(fstat(td__arena_fd(td__arena_default()), &info), 0);
    before.parent_inode = info.st_ino;
    strcpy(before.text, "of the parent");
    strcpy(before.in_own_arena, "in an arena");
    struct td_test_child child = td_test_fork(live_on_in_a_fork, &before);
    CHECK_STR(child.output, "");
    CHECK_EQ(child.status, 0);
    free(child.output);
    CHECK_STR(before.text, "of the parent");
    CHECK_STR(before.in_own_arena, "in an arena");
    char *more = td_alloc(100);
    CHECK(more && more != before.text);
    struct td__arena *found;
    size_t offset;
    CHECK(td__arena_resolve(before.text, &found, &offset));
    td_free(more);
    td_free(before.text);
    td__arena_destroy(arena);
}

static void write_both(void *arg)
{
    char **texts = arg;
    CHECK_STR(texts[0], "changed once");
    CHECK_STR(texts[1], "of the child");
    strcpy(texts[0], "changed twice");
    strcpy(texts[1], "changed");
    CHECK(td_alloc(100) != NULL);
}

static void fork_in_a_fork(void *arg)
{
    char *texts[2] = {arg, td_alloc(100)};
    CHECK_STR(texts[0], "of the parent");
    strcpy(texts[0], "changed once");
    strcpy(texts[1], "of the child");
    struct td_test_child child = td_test_fork(write_both, texts);
    CHECK_EQ(child.status, 0);
    free(child.output);
    CHECK_STR(texts[0], "changed once");
    CHECK_STR(texts[1], "of the child");
}

TEST(arena_after_two_forks)
{
    char *text = td_alloc(100);
    strcpy(text, "of the parent");
    struct td_test_child child = td_test_fork(fork_in_a_fork, text);
    CHECK_EQ(child.status, 0);
    free(child.output);
    CHECK_STR(text, "of the parent");
    td_free(text);
}

/* ---- Threads --------------------------------------------------------------------------------- */

struct bench {
    struct td__arena *arena;
    _Atomic(struct piece *) slots[16]; /* blocks change hands here */
    atomic_int stop;
    atomic_int refused; /* how often the arena was full */
};

struct thread {
    struct bench *bench;
    uint32_t state;
    int steps;
    pthread_t id;
};

static void *alloc_and_free(void *arg)
{
    struct thread *thread = arg;
    struct bench *bench = thread->bench;
    for (int step = 0; step < thread->steps; step++) {
        struct piece *piece = malloc(sizeof *piece);
        piece->size = 1 + next_random(&thread->state) % 60000;
        piece->mark = (unsigned char)next_random(&thread->state);
        piece->memory = td__arena_alloc(bench->arena, piece->size);
        if (!piece->memory) {
            atomic_fetch_add(&bench->refused, 1);
            CHECK_CONTAINS(td_last_error(), "no room");
            free(piece);
            piece = NULL;
        } else {
            fill(piece);
        }
        piece = atomic_exchange(&bench->slots[next_random(&thread->state) % 16], piece);
        if (piece) {
            check_filled(piece);
            CHECK(td__arena_free(bench->arena, piece->memory));
            free(piece);
        }
    }
    return NULL;
}

/* The arena is so small that it is full at times: that, too, happens to several at once. */
TEST(arena_in_threads)
{
    struct bench bench = {.arena = make_arena(MIB / 2)};
    struct thread threads[4];
    for (int i = 0; i < 4; i++) {
        threads[i] = (struct thread){.bench = &bench, .state = (uint32_t)i, .steps = 2000};
        CHECK_EQ(pthread_create(&threads[i].id, NULL, alloc_and_free, &threads[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i].id, NULL);
    for (int i = 0; i < 16; i++) {
        struct piece *piece = atomic_load(&bench.slots[i]);
        if (piece) {
            check_filled(piece);
            CHECK(td__arena_free(bench.arena, piece->memory));
            free(piece);
        }
    }
    CHECK(td__arena_alloc(bench.arena, td__arena_size(bench.arena)) != NULL);
    td__arena_destroy(bench.arena);
}

static void *first_use(void *arg)
{
    (void)arg;
    return td_alloc(100);
}

TEST(arena_first_use_by_many)
{
    pthread_t threads[8];
    for (int i = 0; i < 8; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, first_use, NULL), 0);
    for (int i = 0; i < 8; i++) {
        void *memory;
        struct td__arena *arena;
        size_t offset;
        pthread_join(threads[i], &memory);
        CHECK(memory && td__arena_resolve(memory, &arena, &offset));
        CHECK(arena == td__arena_default()); /* they all got the same one */
        td_free(memory);
    }
}

static void *churn(void *arg)
{
    struct bench *bench = arg;
    uint32_t state = 5;
    while (!atomic_load(&bench->stop)) {
        void *memory = td_alloc(1 + next_random(&state) % 10000);
        CHECK(memory != NULL);
        td_free(memory);
    }
    return NULL;
}

static void allocate_in_fork(void *arg)
{
    (void)arg;
    for (int i = 0; i < 10; i++) {
        void *memory = td_alloc(
            1000); /* no lock may be held by a thread that the child does not have */
        if (!memory)
            _exit(9);
        td_free(memory);
    }
}

TEST(arena_fork_while_threads_allocate)
{
    struct bench bench = {0};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, churn, &bench), 0);
    for (int i = 0; i < 30; i++) {
        struct td_test_child child = td_test_fork(allocate_in_fork, NULL);
        CHECK_EQ(child.status, 0);
        free(child.output);
    }
    atomic_store(&bench.stop, 1);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
}
