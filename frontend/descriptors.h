/* Where our own descriptors are. Programs that become daemons close the low ones blindly: ours stay out of their way.
 *
 * But the kernel makes a process with threads wait while its table of descriptors grows (for RCU: ten milliseconds and
 * more), and CRIU restores a process with a small table. So what a restored process needs to get its memory back is put
 * as high as the table reaches, and out of the way when nobody waits any more. */
#pragma once
#include <stdbool.h>

#define PHOS_DESCRIPTOR_FLOOR 512

/* Both return another number for the same thing and close `low`, or `low` itself if there is no other. */
int phos_descriptor_raise(int low);
int phos_descriptor_raise_at_once(int low);
