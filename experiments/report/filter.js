// Filters the verdict table, and opens every fold before printing. The page reads the same without it.
(function () {
  var table = document.getElementById("verdict-table");
  var filters = document.querySelectorAll(".filter select");
  var count = document.getElementById("verdict-count");
  function apply() {
    var visible = 0;
    table.querySelectorAll("tbody tr").forEach(function (row) {
      var keep = Array.prototype.every.call(filters, function (filter) {
        return !filter.value || row.getAttribute("data-" + filter.name) === filter.value;
      });
      row.hidden = !keep;
      visible += keep ? 1 : 0;
    });
    count.textContent = visible + " rows";
  }
  if (table) {
    filters.forEach(function (filter) { filter.addEventListener("change", apply); });
    document.querySelector(".filter").hidden = false;
    apply();
  }
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (fold) { fold.open = true; });
  });
})();
