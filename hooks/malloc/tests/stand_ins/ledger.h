/* What is live and what is registered, shared by the pretended libraries. It notes what real ones would not survive. */
#ifndef LEDGER_H
#define LEDGER_H

#include <stddef.h>

extern __thread void *ledger_context;     /* this thread's; it is noted for memory that becomes live */
extern __thread int ledger_capture_mode;  /* this thread's: 0 means that registering ends the captures of others */

void ledger_live(void *start, size_t bytes);      /* memory can be reached from now on */
void ledger_gone(void *start, size_t bytes);      /* memory is freed or unmapped now */
int ledger_register(void *start, size_t bytes);   /* 0, or not 0 if it may not be registered */
int ledger_deregister(void *start);               /* 0, or not 0 if it is not registered */

/* From ledger_hold on each registration, and the opening of cuFile, needs a pass, and waits for it. */
void ledger_hold(void);
void ledger_let_go(long passes); /* there are so many more */
void ledger_await_held(void);    /* waits until something waits for its pass */
void ledger_pass(void);          /* called by what needs one */

long ledger_registered(void);  /* registrations there are now */
long ledger_violations(void);  /* things that must not happen, and did */

#endif
