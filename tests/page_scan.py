"""Tests that need a kernel that says which pages a process has."""

import pytest

from phos.gpu_engine import procfs

needs_page_scan = pytest.mark.skipif(not procfs.says_pages(), reason="Linux before 6.7: no PAGEMAP_SCAN")
