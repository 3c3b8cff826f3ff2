/* What is live and what is registered, shared by the pretended libraries. It notes what real ones would not survive. */
#ifndef LEDGER_H
#define LEDGER_H

#include <stddef.h>

void ledger_live(void *start, size_t bytes);      /* memory can be reached from now on */
void ledger_gone(void *start, size_t bytes);      /* memory is freed or unmapped now */
int ledger_register(void *start, size_t bytes);   /* 0, or not 0 if it may not be registered */
int ledger_deregister(void *start);               /* 0, or not 0 if it is not registered */

long ledger_registered(void);  /* registrations there are now */
long ledger_violations(void);  /* things that must not happen, and did */

#endif
