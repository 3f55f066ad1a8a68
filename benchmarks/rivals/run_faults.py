"""Ranges of one object, read by a client with its default settings: granular, s3fs, gcsfs or obstore.

Prints the checksum of each range, or the error.
"""

import json
import pathlib
import sys
import time
import zlib

who = sys.argv[1]
job = json.loads(pathlib.Path(sys.argv[2]).read_text())
starts, stops = job['starts'], job['stops']


def granular():
    import s3fs  # noqa: F401 (which is imported by the first read otherwise)

    import granular

    path = granular.Path('s3://bucket/object', endpoint_url=job['endpoint'])
    return lambda: path.read_ranges(starts, stops)


def s3fs():
    import s3fs

    fs = s3fs.S3FileSystem(endpoint_url=job['endpoint'], client_kwargs={'region_name': 'us-east-1'})
    return lambda: fs.cat_ranges(['bucket/object'] * len(starts), starts, stops, on_error='raise')


def gcsfs():
    import gcsfs

    fs = gcsfs.GCSFileSystem(token=job['account'], endpoint_url=job['endpoint'], project='project')
    return lambda: fs.cat_ranges(['bucket/object'] * len(starts), starts, stops, on_error='raise')


def obstore():
    import configparser
    import datetime

    import obstore
    from obstore.store import S3Store

    def provide():
        parser = configparser.ConfigParser()
        parser.read(job['credentials'])
        keys = parser['default']
        return {
            'access_key_id': keys['aws_access_key_id'],
            'secret_access_key': keys['aws_secret_access_key'],
            'expires_at': datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1),
        }

    store = S3Store(
        'bucket',
        endpoint=job['endpoint'],
        region='us-east-1',
        credential_provider=provide,
        client_options={'allow_http': True},
    )
    return lambda: [bytes(result) for result in obstore.get_ranges(store, 'object', starts=starts, ends=stops)]


read = {'granular': granular, 's3fs': s3fs, 'gcsfs': gcsfs, 'obstore': obstore}[who]
try:
    fn = read()  # imports and set-up are not measured
    started = time.perf_counter()
    result = {'sums': [zlib.crc32(piece) for piece in fn()]}
except Exception as error:
    result = {'error': type(error).__name__, 'says': str(error)[:300]}
print(json.dumps({**result, 'seconds': time.perf_counter() - started}), flush=True)
