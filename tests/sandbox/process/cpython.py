"""Which modules of CPython's tests are run, and every test of theirs that ends otherwise in a box, by the promise.

The promises are explained in docs/compatibility.md under the same names.
"""

from __future__ import annotations

READ_ONLY = "A read-only interpreter"
SOCKETS = "Few kinds of sockets"
INTERFACES = "No view of network interfaces"
CORES = "Cores are a limit"
LENGTH = "Files no longer than the disk"
MEMFD = "No memory that nobody counts"
WARM = "An interpreter that runs already"
PROMISES = (READ_ONLY, SOCKETS, INTERFACES, CORES, LENGTH, MEMFD, WARM)

HANDFUL = """
    test_asyncio.test_streams test_fcntl test_fork1 test_locale test_mmap test_popen test_posix test_pty test_shutil
    test_sqlite3 test_tempfile test_thread test_time test_uuid
    """.split()  # noqa: SIM905 - a table
"""Always run; they take seconds."""

MODULES = """
    test_argparse test_array test_ast test_asyncgen test_asyncio test_atexit test_base64 test_bdb test_binascii
    test_bisect test_bufio test_builtin test_bytes test_bz2 test_cmd test_cmd_line test_cmd_line_script test_code
    test_codecs test_codeop test_collections test_compile test_compileall test_concurrent_futures test_configparser
    test_contextlib test_copy test_coroutines test_cprofile test_csv test_ctypes test_dataclasses test_datetime test_dbm
    test_decimal test_descr test_dict test_difflib test_dis test_doctest test_email test_enum test_epoll
    test_exception_group test_exceptions test_faulthandler test_fcntl test_file test_fileio test_float test_fork1
    test_fstring test_ftplib test_functools test_gc test_generators test_getpass test_glob test_grp test_gzip
    test_hashlib test_heapq test_htmlparser test_http_cookiejar test_http_cookies test_httplib test_httpservers
    test_imaplib test_import test_importlib test_inspect test_io test_ipaddress test_itertools test_json test_largefile
    test_list test_locale test_logging test_long test_lzma test_math test_memoryio test_memoryview test_mimetypes
    test_minidom test_mmap test_multiprocessing_fork test_multiprocessing_forkserver test_multiprocessing_main_handling
    test_multiprocessing_spawn test_netrc test_openpty test_os test_pathlib test_pdb test_pickle test_pkgutil
    test_platform test_poll test_popen test_poplib test_posix test_posixpath test_pty test_pwd test_py_compile
    test_queue test_random test_re test_resource test_runpy test_sax test_sched test_secrets test_select test_selectors
    test_set test_shelve test_shlex test_shutil test_signal test_site test_smtplib test_socket test_sort test_sqlite3
    test_ssl test_stat test_statistics test_str test_string test_struct test_subprocess test_super test_syntax test_sys
    test_sysconfig test_syslog test_tarfile test_tempfile test_textwrap test_thread test_threading test_threading_local
    test_time test_traceback test_tracemalloc test_tty test_types test_typing test_unittest test_urllib
    test_urllib2_localnet test_uuid test_venv test_wait3 test_wait4 test_warnings test_weakref test_webbrowser
    test_wsgiref test_xml_etree test_xmlrpc test_zipfile test_zipimport test_zlib test_zoneinfo
    """.split()  # noqa: SIM905 - likewise
"""All of them; they take an hour."""

DIFFERENCES = {
    "test_bdb": {"*": READ_ONLY},
    "test_builtin": {"TestBreakpoint.test_envar_*": WARM},
    "test_doctest": {"*TestDocTestFinder.test_empty_namespace_package": READ_ONLY},
    "test_import": {"*": READ_ONLY},
    "test_importlib": {"test_threaded_import.ThreadedImportTests.*": READ_ONLY},
    "test_largefile": {"*": LENGTH},
    "test_mmap": {"LargeMmapTests.*": LENGTH},
    "test_os": {
        "CPUCountTests.*affinity": CORES,
        "MemfdCreateTests.*": MEMFD,
    },
    "test_pickle": {"*.test_unpickle_module_race": READ_ONLY},
    "test_posix": {"PosixTester.test_sched_setaffinity": CORES},
    "test_resource": {"ResourceTest.test_fsize_ismax": LENGTH},
    "test_runpy": {"RunModuleTestCase.*": READ_ONLY},
    "test_site": {"HelperFunctionsTests.test_s_option": WARM},
    "test_socket": {
        "*UDPLITE*": SOCKETS,
        "GeneralModuleTests.test*Interface*": INTERFACES,
        "GeneralModuleTests.*scopeid_symbolic": INTERFACES,
    },
    "test_traceback": {"*SuggestionFormattingTests.test_import_from_*": READ_ONLY},
    "test_uuid": {"*.test_ifconfig_getnode": INTERFACES, "*.test_ip_getnode": INTERFACES},
}
"""Of each module the tests that may end otherwise, without the module's own name."""
