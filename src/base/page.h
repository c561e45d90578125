/* The size of a page of memory: 4 KiB on x86-64, and 4, 16 or 64 KiB on aarch64, as the kernel was built. */
#ifndef TD_BASE_PAGE_H
#define TD_BASE_PAGE_H

#include <stddef.h>
#include <unistd.h>

static inline size_t td__page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/** `size` up to the next whole page. */
static inline size_t td__whole_pages(size_t size)
{
    size_t page = td__page_size();
    return (size + page - 1) & ~(page - 1);
}

#endif
