"""nginx as a bucket: a folder with ranges, without latency, with latency, with a tail, or over TLS.

It has core 0, or a quarter of the cores if there are eight or more, the last ones.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.servers import free_ports

MODULES = pathlib.Path('/usr/lib/nginx/modules')
NEEDED = 'the benchmarks need nginx with lua, and wrk: apt-get install nginx-light libnginx-mod-http-lua wrk'

CONF = """
load_module {modules}/ndk_http_module.so;
load_module {modules}/ngx_http_lua_module.so;
{user}
worker_processes {workers};
worker_cpu_affinity {cores};
worker_rlimit_nofile 65536;
daemon off;
pid {own}/nginx.pid;
error_log {own}/error.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; sendfile on; tcp_nopush off; tcp_nodelay on; keepalive_requests 1000000000; keepalive_timeout 300;
  client_body_temp_path {own}/body; proxy_temp_path {own}/proxy; fastcgi_temp_path {own}/fastcgi;
  uwsgi_temp_path {own}/uwsgi; scgi_temp_path {own}/scgi;
  open_file_cache max=12000 inactive=600s; autoindex on; lua_package_path "/usr/share/lua/5.1/?.lua;;";
  root {folder};
  server {{ listen 127.0.0.1:{instant} backlog=4096; {gcs} }}
  server {{
    listen 127.0.0.1:{delayed} backlog=4096; {gcs}
    access_by_lua_block {{ ngx.sleep(0.015 + math.random() * 0.02) }}
  }}
  server {{
    listen 127.0.0.1:{middle} backlog=8192;
    access_by_lua_block {{ ngx.sleep(0.04 + math.random() * 0.02) }}
  }}
  server {{
    listen 127.0.0.1:{far} backlog=4096;
    access_by_lua_block {{ ngx.sleep(0.08 + math.random() * 0.04) }}
  }}
  server {{
    listen 127.0.0.1:{uneven} backlog=4096;
    access_by_lua_block {{ ngx.sleep(math.random() < 0.01 and 2 or 0.015 + math.random() * 0.02) }}
  }}
  server {{
    listen 127.0.0.1:{faulty} backlog=4096;
    access_by_lua_block {{
      ngx.sleep(0.015 + math.random() * 0.02)
      local dice = math.random()
      if dice < 0.01 then ngx.exit(dice < 0.0025 and 503 or dice < 0.005 and 500 or 444) end
    }}
  }}
  server {{
    listen 127.0.0.1:{tls} ssl backlog=4096;
    ssl_certificate {own}/cert.pem; ssl_certificate_key {own}/key.pem; ssl_session_cache shared:SSL:4m;
  }}
}}
"""
GCS = 'rewrite ^/download/storage/v1/b/([^/]+)/o/(.+)$ /$1/$2 last;'


class Server(NamedTuple):
    """The addresses of the folder."""

    instant: str
    delayed: str
    middle: str
    far: str
    uneven: str
    faulty: str
    tls: str
    certificate: str


@contextlib.contextmanager
def serving(folder: pathlib.Path, own: pathlib.Path) -> Iterator[Server]:
    """Run nginx over a folder, with its own files in another folder."""
    program = shutil.which('nginx', path=f'{os.environ["PATH"]}:/usr/sbin')
    if program is None or shutil.which('wrk') is None or not (MODULES / 'ngx_http_lua_module.so').exists():
        raise SystemExit(NEEDED)
    own.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ['openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days', '2', '-subj', '/CN=127.0.0.1',
         '-addext', 'subjectAltName=IP:127.0.0.1', '-keyout', own / 'key.pem', '-out', own / 'cert.pem'],
        check=True, capture_output=True,
    )  # fmt: skip
    names = Server._fields[:-1]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    user = 'user root;' if os.geteuid() == 0 else ''
    workers, last = max(1, (os.cpu_count() or 1) // 4), os.cpu_count() or 1
    cores = ' '.join(f'{1 << (last - 1 - worker):b}' for worker in range(workers)) if workers > 1 else '01'
    conf = CONF.format(
        modules=MODULES, user=user, own=own, folder=folder, gcs=GCS, workers=workers, cores=cores, **ports
    )
    (own / 'nginx.conf').write_text(conf)
    process = subprocess.Popen(
        [program, '-p', own, '-c', own / 'nginx.conf'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', ports['tls']), 1):
                break
            if process.poll() is not None:
                raise RuntimeError((own / 'error.log').read_text())
            time.sleep(0.02)
        addresses = {name: f'http{"s" if name == "tls" else ""}://127.0.0.1:{port}' for name, port in ports.items()}
        yield Server(**addresses, certificate=str(own / 'cert.pem'))
    finally:
        process.terminate()
        process.wait()
