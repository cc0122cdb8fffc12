/* Threads of ours in other people's processes. */
#pragma once

/* Starts one that nobody joins, with all signals blocked: the program's handlers are none of its business. 0, or an error
 * number. */
int phos_thread_start(void *(*main)(void *), void *argument);
