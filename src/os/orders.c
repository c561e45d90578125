/* The page of the launcher's orders; see orders.h. */
#include "os/orders.h"

#include "base/fail.h"
#include "base/number.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAGIC = 0x54644f72, SIZE = 4096 };

td_status td__orders_open(struct td__orders **orders, int *fd)
{
    *fd = memfd_create("tandem-orders", MFD_CLOEXEC);
    void *map = *fd >= 0 && !ftruncate(*fd, SIZE)
                    ? mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0)
                    : MAP_FAILED;
    if (map == MAP_FAILED) {
        int error = errno;
        if (*fd >= 0)
            close(*fd);
        *fd = -1;
        return td_fail(TD_ERR_SYSTEM, "cannot make a page to share with the workers: %s",
                       td__errno_text(error));
    }
    *orders = map;
    (*orders)->magic = MAGIC;
    return TD_OK;
}

void td__orders_close(struct td__orders *orders, int fd)
{
    if (!orders)
        return;
    munmap(orders, SIZE);
    close(fd);
}

void td__orders_leave(struct td__orders *orders)
{
    atomic_store(&orders->leave, 1);
    atomic_fetch_add(&orders->version, 1);
}

static const struct td__orders *found;

static void find(void)
{
    int fd;
    struct stat stat;
    const char *text = getenv(TD__ORDERS_VARIABLE);
    if (!text || !td__parse_int(text, 3, INT_MAX, &fd) || fstat(fd, &stat) || stat.st_size != SIZE)
        return;
    struct td__orders *orders = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
    if (orders == MAP_FAILED)
        return;
    if (orders->magic != MAGIC) { /* the descriptor is another one here */
        munmap(orders, SIZE);
        return;
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    found = orders;
}

const struct td__orders *td__orders_find(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find);
    return found;
}
