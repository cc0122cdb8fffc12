/* Where our own descriptors are. Programs that become daemons close the low ones blindly: ours stay out of their way.
 *
 * But the kernel makes a process with threads wait while its table of descriptors grows (for RCU: ten milliseconds and
 * more), and CRIU restores a process with a small table. So what a restored process needs to get its memory back is put
 * as high as the table reaches, and out of the way when nobody waits any more. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

#define PHOS_DESCRIPTOR_FLOOR 512
#define PHOS_DESCRIPTORS_AT_A_TIME 8 /* how many we need, but for those that come with a packet; and some */

/* Both return another number for the same thing and close `low`, or `low` itself if there is no other. */
int phos_descriptor_raise(int low);
int phos_descriptor_raise_at_once(int low);

/* Until phos_descriptors_lower() the process may have as many descriptors as its hard limit allows: a program may have used
 * up its own. By the control thread, and in a forked child. */
void phos_descriptors_lift(void);
void phos_descriptors_lower(void);
/* At least how many more there can be then; no more than `enough` are counted. */
size_t phos_descriptors_left(size_t enough);
