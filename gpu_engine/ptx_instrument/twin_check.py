"""The PTX that twins have in common: what is done about an address that is in none of the first ranges of a launch."""

from __future__ import annotations

from phos.gpu_engine.ptx_instrument import twin_table as t

PAUSE_NS = 2000
"""Between two looks at a chunk that is waited for. Looking goes to host memory, by way of the bus."""


def check_function(name: str) -> str:
    """The function ``name(launch, address, site)``: returns if the access may be made.

    ``site``: the line of the access, times two, plus one for a write.

    Reads of a launch's own ranges come first; then the place of the address in the window's memory, if it has one
    (shared and local memory, module variables, memory that is younger than the window have none); then the state of its
    chunk as it is at this moment, in host memory that phosd shares. So what came to be saved, or loaded, since the
    guess is in order whatever was guessed. Anything else is reported, before the access is made; a twin in a lazy
    restore then waits for the data, and traps if it does not come. Once the report is full nothing more is counted: an
    atomic operation in host memory goes over the bus for every thread.
    """
    return f"""
.func {name}(.param .b64 {name}_launch, .param .b64 {name}_address, .param .b32 {name}_site)
{{
	.reg .pred %p;
	.reg .b32 %count, %i, %low, %high, %state, %shift, %slot, %site, %kernel;
	.reg .b64 %launch, %address, %at, %begin, %end, %distance, %window, %map, %place, %chunk, %closed, %start, %now;
	ld.param.u64 %launch, [{name}_launch];
	ld.param.u64 %address, [{name}_address];
	ld.u32 %count, [%launch+{t.LAUNCH_RANGES}];
	add.u64 %at, %launch, {t.LAUNCH_RANGE};
	mov.u32 %i, 0;
$next_range:
	setp.ge.u32 %p, %i, %count;
	@%p bra $no_range;
	ld.u64 %begin, [%at];
	ld.u64 %end, [%at+8];
	sub.u64 %distance, %address, %begin;
	setp.lt.u64 %p, %distance, %end;
	@%p bra $done;
	add.u64 %at, %at, 16;
	add.u32 %i, %i, 1;
	bra $next_range;
$no_range:
	ld.u64 %window, [%launch+{t.LAUNCH_WINDOW}];
	ld.u64 %map, [%launch+{t.LAUNCH_MAP}];
	ld.u32 %high, [%map+{t.MAP_COUNT}];
	mov.u32 %low, 0;
$search:
	setp.ge.u32 %p, %low, %high;
	@%p bra $done;
	add.u32 %i, %low, %high;
	shr.u32 %i, %i, 1;
	mad.wide.u32 %place, %i, {t.PLACE_BYTES}, %map;
	ld.u64 %begin, [%place+{t.MAP_PLACE + t.PLACE_BEGIN}];
	setp.ge.u64 %p, %address, %begin;
	@%p bra $not_below;
	mov.u32 %high, %i;
	bra $search;
$not_below:
	ld.u64 %end, [%place+{t.MAP_PLACE + t.PLACE_END}];
	setp.lt.u64 %p, %address, %end;
	@%p bra $found;
	add.u32 %low, %i, 1;
	bra $search;
$found:
	ld.u64 %chunk, [%place+{t.MAP_PLACE + t.PLACE_STATE}];
	ld.u64 %distance, [%place+{t.MAP_PLACE + t.PLACE_DELTA}];
	sub.u64 %begin, %address, %begin;
	add.u64 %distance, %distance, %begin;
	ld.u32 %shift, [%window+{t.WINDOW_SHIFT}];
	shr.u64 %distance, %distance, %shift;
	shl.b64 %distance, %distance, 2;
	add.u64 %chunk, %chunk, %distance;
	ld.u64 %closed, [%window+{t.WINDOW_CLOSED}];
	ld.volatile.u32 %state, [%chunk];
	setp.eq.u32 %p, %state, {t.SAVED};
	@%p bra $saved;
	ld.volatile.u32 %state, [%closed];
	setp.ne.u32 %p, %state, 0;
	@%p bra $saved;
	add.u64 %at, %window, {t.WINDOW_REPORTS};
	ld.volatile.u32 %slot, [%at];
	setp.ge.u32 %p, %slot, {t.REPORTS};
	@%p bra $reported;
	atom.add.u32 %slot, [%at], 1;
	setp.ge.u32 %p, %slot, {t.REPORTS};
	@%p bra $reported;
	ld.param.u32 %site, [{name}_site];
	ld.u32 %kernel, [%launch+{t.LAUNCH_KERNEL}];
	mad.wide.u32 %at, %slot, {t.REPORT_BYTES}, %window;
	st.volatile.u32 [%at+{t.WINDOW_REPORT + 8}], %kernel;
	st.volatile.u32 [%at+{t.WINDOW_REPORT + 12}], %site;
	st.volatile.u64 [%at+{t.WINDOW_REPORT}], %address;
$reported:
	membar.sys;
	ld.u32 %state, [%window+{t.WINDOW_MODE}];
	setp.eq.u32 %p, %state, {t.COW};
	@%p bra $done;
	ld.u64 %end, [%window+{t.WINDOW_LIMIT}];
	mov.u64 %start, %globaltimer;
$wait:
	ld.volatile.u32 %state, [%chunk];
	setp.eq.u32 %p, %state, {t.SAVED};
	@%p bra $saved;
	ld.volatile.u32 %state, [%closed];
	setp.ne.u32 %p, %state, 0;
	@%p bra $saved;
	nanosleep.u32 {PAUSE_NS};
	mov.u64 %now, %globaltimer;
	sub.u64 %now, %now, %start;
	setp.lt.u64 %p, %now, %end;
	@%p bra $wait;
	mov.u32 %state, 1;
	st.volatile.u32 [%window+{t.WINDOW_TRAPPED}], %state;
	membar.sys;
	trap;
$saved:
	fence.acq_rel.sys;
$done:
	ret;
}}
"""
