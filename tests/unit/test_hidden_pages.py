"""Pages hidden from CRIU: criu_plugin/hidden_pages.c under hidden_cases.c, with the kernel's own PAGEMAP_SCAN."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.page_scan import needs_page_scan

ROOT = Path(__file__).resolve().parents[2]
HEADERS = [ROOT / "build/criu/include", ROOT / ".prefix/lib/phos/criu/include", Path("/usr/include/criu")]
HEADER = next((folder for folder in HEADERS if (folder / "criu-plugin.h").exists()), None)
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
    pytest.mark.skipif(HEADER is None, reason="no criu-plugin.h"),
    needs_page_scan,
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hidden") / "hidden_cases"
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-rdynamic"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = [f"-I{ROOT / 'criu_plugin'}", f"-I{ROOT / 'include'}", "-isystem", str(HEADER)]
    sources = [ROOT / "tests/unit/hidden_cases.c", ROOT / "criu_plugin/hidden_pages.c"]
    subprocess.run(["gcc", *flags, *sanitize, *include, "-o", made, *sources], check=True)
    return made


@pytest.mark.parametrize("seed", range(4))
def test_criu_is_shown_all_but_what_is_copied(program: Path, seed: int) -> None:
    done = subprocess.run([program, str(seed), "60"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("pages asked for") == 60


LOADS = r"""
#include <dlfcn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
void print_on_level(unsigned int level, const char *format, ...) { (void)level; (void)format; }
int main(int count, char **words)
{
	void *plugin = count == 2 ? dlopen(words[1], RTLD_LAZY) : NULL;
	bool (*can_hide)(void) = plugin ? (bool (*)(void))dlsym(plugin, "phos_can_hide") : NULL;
	return can_hide ? (puts(can_hide() ? "can hide" : "cannot"), 0) : (puts(dlerror()), 1);
}
"""


def test_only_a_preloaded_plugin_can_hide(tmp_path: Path) -> None:
    """As CRIU loads it: by dlopen(), whether the launcher has preloaded it or not."""
    plugin, program, source = tmp_path / "plugin.so", tmp_path / "loads", tmp_path / "loads.c"
    source.write_text(LOADS)
    other = tmp_path / "other.c"
    other.write_text("int phos_link_task_pages(int pid, int table) { return pid - table; }\n")
    include = [f"-I{ROOT / 'criu_plugin'}", f"-I{ROOT / 'include'}", "-isystem", str(HEADER)]
    common = ["gcc", "-std=gnu11", "-D_GNU_SOURCE=", *include]
    shared = ["-shared", "-fPIC", "-Wl,-z,relro,-z,now", "-o", plugin, ROOT / "criu_plugin/hidden_pages.c", other]
    subprocess.run([*common, *shared], check=True)
    subprocess.run([*common, "-rdynamic", "-o", program, source], check=True)
    for preload, says in (("", "cannot"), (str(plugin), "can hide")):
        environment = {**os.environ, "LD_PRELOAD": preload}
        done = subprocess.run([program, plugin], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{says}\n"
