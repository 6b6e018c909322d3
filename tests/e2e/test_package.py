"""The Debian package that cpack makes: its files run, link and verify from where it puts them."""

import gzip
import os
import pathlib
import shutil
import socket
import subprocess

import pytest

pytestmark = [pytest.mark.no_asan, pytest.mark.slow]

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TANDEM_BUILD", ROOT / "build"))
MODEL = ROOT / "configs" / "models" / "tandem-nano"


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    for tool in ("cpack", "dpkg-deb", "dpkg-shlibdeps"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool}")
    folder = tmp_path_factory.mktemp("package")
    config = BUILD / "CPackConfig.cmake"
    run("cpack", "--config", config, "-G", "DEB", "-B", folder, cwd=BUILD)
    (deb,) = folder.glob("tandem_*.deb")
    return deb


@pytest.fixture(scope="module")
def installed(package, tmp_path_factory):
    folder = tmp_path_factory.mktemp("root")
    run("dpkg-deb", "-x", package, folder)
    return folder


def test_names_what_it_needs(package):
    needs = run("dpkg-deb", "-f", package, "Depends")
    for library in ("libuv1", "libcjson1", "libpcre2-8-0", "libnettle8", "libedit2", "libpng16-16",
                    "libjpeg62-turbo", "libwebp7", "libc6"):
        assert library in needs


def test_program_runs(installed):
    program = installed / "usr/bin/tandem"
    assert run(program, "--version").startswith("tandem ")
    assert "MLA" in run(program, "inspect", "--model", MODEL)


def test_unit_is_valid(installed):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    unit = installed / "usr/lib/systemd/system/tandem.service"
    # The program is not at /usr/bin here.
    text = unit.read_text().replace("=/usr/bin/tandem ", f"={installed}/usr/bin/tandem ")
    assert str(installed) in text
    copy = installed / "tandem.service"
    copy.write_text(text)
    run("systemd-analyze", "verify", "--man=no", copy)


def test_lintian_finds_no_error(package):
    if not shutil.which("lintian"):
        pytest.skip("no lintian")
    found = subprocess.run(["lintian", "--tag-display-limit", "0", package], capture_output=True, text=True).stdout
    assert not [line for line in found.splitlines() if line.startswith("E:")], found


def test_what_comes_with_it(installed):
    share = installed / "usr/share"
    for file in ("bash-completion/completions/tandem", "zsh/vendor-completions/_tandem", "doc/tandem/OPTIONS.md"):
        assert "--kv-dtype" in (share / file).read_text()
    assert "-l kv-dtype" in (share / "fish/vendor_completions.d/tandem.fish").read_text()
    assert b"SYNOPSIS" in gzip.decompress((share / "man/man1/tandem.1.gz").read_bytes())
    assert "License: Expat" in (share / "doc/tandem/copyright").read_text()
    assert (share / "doc/tandem/README.md").read_text().startswith("# tandem")


def test_service_manager_is_told(tandem_bin):
    """READY once requests are served, STOPPING when they no longer are."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0tandem-notify-%d" % os.getpid())
        manager.settimeout(60)
        environment = os.environ | {"NOTIFY_SOCKET": "@tandem-notify-%d" % os.getpid()}
        words = [tandem_bin, "serve", "--model", MODEL, "--port", "0", "--device", "cpu", "--ctx-size", "512"]
        server = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
        assert manager.recv(100) == b"READY=1"
        server.terminate()
        assert manager.recv(100) == b"STOPPING=1"
        assert server.wait(60) == 0


def test_program_embeds_it(installed, tmp_path):
    compiler = shutil.which("cc")
    if not compiler or not shutil.which("pkg-config"):
        pytest.skip("no cc or pkg-config")
    (pc,) = installed.glob("usr/lib/**/pkgconfig/tandem.pc")
    environment = os.environ | {"PKG_CONFIG_PATH": str(pc.parent)}
    flags = run("pkg-config", "--cflags", "--libs", "tandem", env=environment).split()
    source = tmp_path / "embed.c"
    source.write_text(
        '#include <stdio.h>\n#include "tandem.h"\n'
        "int main(int argc, char **argv) {\n"
        "  char error[256];\n  tandem *model;\n  tandem_opts opts = {.model_dir = argv[argc - 1]};\n"
        "  if (tandem_open(&model, &opts, error, sizeof error)) return puts(error), 1;\n"
        "  tandem_close(model);\n  return puts(\"opened\") < 0;\n}\n"
    )
    run(compiler, source, "-o", tmp_path / "embed", *flags)
    assert "opened" in run(tmp_path / "embed", MODEL)


def test_examples_parse(installed, tandem_bin):
    for example in (installed / "usr/share/doc/tandem/examples").glob("serve*.json"):
        done = subprocess.run(
            [tandem_bin, "serve", "--config", example], capture_output=True, text=True
        )
        assert "is not an option" not in done.stderr and "wrong type" not in done.stderr
        assert "/srv/models/" in done.stderr  # all that is missing is the model
