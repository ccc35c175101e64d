"""A Ray address at which nothing listens is refused at once, in one sentence."""

import socket

import pytest

from longtail.cluster.ray_cluster import RayCluster
from longtail.core.errors import CapacityError


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_without_ray_is_refused_with_what_to_do(form):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = form.format(s.getsockname()[1])
        with pytest.raises(CapacityError, match=r"nothing answers there .*ray start"):
            RayCluster(workers=1, threads=1, address=address, tell=print)
