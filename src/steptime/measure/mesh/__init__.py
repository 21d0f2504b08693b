"""From pairwise latency and bandwidth to a mesh: read, discover the axes, regress each of them, give a confidence."""

from steptime.measure.mesh import cluster_file as cluster_file
from steptime.measure.mesh.discover import discover as discover
from steptime.measure.mesh.links import Links as Links
from steptime.measure.mesh.links import Quantity as Quantity
from steptime.measure.mesh.read import read_links as read_links
