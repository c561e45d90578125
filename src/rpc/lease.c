/* Tensors that are lent to other workers of this host, and borrowed from them. */
#include "rpc/lease.h"

#include "base/fail.h"
#include "rpc/agent.h"
td_status td__lease_make(struct td__agent *agent, int to, td_tensor **tensor, uint64_t *lease,
                         uint64_t *offset)
{
    (void)agent; (void)to; (void)tensor; (void)lease; (void)offset;
    return td_fail(TD_ERR_UNSUPPORTED, "lease");
}
void td__lease_end(struct td__agent *agent, int from, uint64_t lease){(void)agent; (void)from; (void)lease;}
void td__lease_end_all(struct td__agent *agent, int from){(void)agent; (void)from;}
td_status td__lease_borrow(struct td__agent *agent, int from, uint64_t lease, uint64_t offset,
                           const struct td__layout *layout, td_tensor **tensor)
{
    (void)agent; (void)from; (void)tensor; (void)lease; (void)offset;(void)layout;
    return td_fail(TD_ERR_UNSUPPORTED, "lease");
}
td_value *td__module_pack(td_module *module){(void)module;td_fail(TD_ERR_UNSUPPORTED,"module");return NULL;}
td_module *td__module_unpack(const td_value *packed){(void)packed;td_fail(TD_ERR_UNSUPPORTED,"module");return NULL;}
