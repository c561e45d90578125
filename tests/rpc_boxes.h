/* Workers "w0", "w1", … for tests of references and tensors: a class whose objects are counted, functions that keep and
 * return values, and messages that are held back, reordered and repeated. */
#ifndef TANDEM_TESTS_RPC_BOXES_H
#define TANDEM_TESTS_RPC_BOXES_H

#include <tandem/tandem.h>

/** Becomes the worker of this rank, with these functions registered:
 *
 *     Box(value = nil)   get()  add(n: int)  fail()        a class; Box("bad") fails
 *     echo(x)   keep(x)  kept()  drop()                                             one value that the worker keeps
 *     sleep(ms: int, x)   fail(text: text)   Net()                                  Net is a module */
void boxes_begin(void);

/** Checks that nothing is left on any worker, and shuts down; no reference is reported. */
void boxes_end(void);

/** The same for the count of objects, entries, and what is kept for other workers; on all workers. */
void boxes_check_empty(void);

/** The objects of this worker; its entries; its references that are kept for children; tensors that it lends. */
int boxes_live(void);
int boxes_entries(void);
int boxes_children(void);
int boxes_leases(void);

/** "w1". */
const char *boxes_name(int rank);

/** The value of an integer. */
int64_t boxes_int(const td_value *value);

/** From now on, calls of the library's own functions to this worker arrive late and in any order, and control messages
 *  also twice, and are repeated after 30 ms; until boxes_delay_end(). */
void boxes_delay(uint64_t seed);
void boxes_delay_end(void);

/** What was logged as a warning since boxes_begin(). */
const char *boxes_warnings(void);

#endif
