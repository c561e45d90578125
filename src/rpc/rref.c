#include "base/fail.h"
#include "rpc/agent.h"
td_status td__rref_put(struct td__agent *agent, int to, td_rref *rref, struct td__buffer *bytes){(void)agent;(void)to;(void)rref;(void)bytes;return TD_ERR_UNSUPPORTED;}
td_rref *td__rref_get(struct td__agent *agent, int from, const void *bytes, size_t size){(void)agent;(void)from;(void)bytes;(void)size;return NULL;}
td_rref *td_rref_retain(td_rref *rref){return rref;}
void td_rref_release(td_rref *rref){(void)rref;}
const char *td_rref_owner(const td_rref *rref){(void)rref;return "";}
td_value *td__module_pack(td_module *module){(void)module;td_fail(TD_ERR_UNSUPPORTED,"module");return NULL;}
td_module *td__module_unpack(const td_value *packed){(void)packed;td_fail(TD_ERR_UNSUPPORTED,"module");return NULL;}
